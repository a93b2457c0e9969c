#include <algorithm>

#include "views.hpp"

namespace storm {

bool View::has(Member who) const { return std::find(members.begin(), members.end(), who) != members.end(); }

Views::Views(const ViewsConfig& config, Nanos now) : config_(config), heard_(config.capacity, now) {
    view_.number = config.number;
    view_.members = config.members;
}
void Views::watch(Nanos now) {
    watching_ = true;
    tick_at_ = std::min(tick_at_, now);
}
bool Views::watching() const { return watching_; }
void Views::receive(std::uint16_t from, std::span<const std::byte>, Nanos now) {
    hear(from, now);
    watch(now + config_.silence / 10);
}
void Views::hear(std::uint16_t from, Nanos now) { heard_[from] = now; }
void Views::leave_out(std::uint16_t rank) {
    const auto gone = std::erase_if(view_.members, [&](Member m) { return m.rank == rank; });
    if (gone > 0) ++view_.number;
}
void Views::gone(std::uint16_t from, Nanos) { leave_out(from); }
void Views::blocked(std::uint16_t from, Nanos) { leave_out(from); }
void Views::readmitted(Member who, Nanos now) { heard_[who.rank] = now; }
void Views::tick(Nanos now) {
    if (now < tick_at_) return;
    tick_at_ = now + config_.silence / 10;
    const auto heard = std::count_if(view_.members.begin(), view_.members.end(), [&](Member m) {
        return m.rank == config_.self.rank || now - heard_[m.rank] <= config_.silence;
    });
    for (const Member& m : std::vector(view_.members)) {
        if (m.rank == config_.self.rank || 2 * heard <= static_cast<std::ptrdiff_t>(view_.members.size())) continue;
        if (now - heard_[m.rank] > config_.silence) leave_out(m.rank);
    }
    for (const Member& m : view_.members) {
        if (m.rank != config_.self.rank) notes_.push_back({m.rank, std::vector<std::byte>(40)});
    }
}
Nanos Views::next_timer() const { return tick_at_; }
std::optional<Note> Views::take_note() {
    if (notes_.empty()) return std::nullopt;
    Note note = std::move(notes_.back());
    notes_.pop_back();
    return note;
}
void Views::enroll(const Position& position) { positions_.push_back(position); }
bool Views::advance(const Position&) { return true; }
void Views::withdraw(std::uint32_t session) {
    std::erase_if(positions_, [&](const Position& p) { return p.session == session; });
}
void Views::ask_in(Member, std::span<const std::byte>, Nanos) {}
void Views::ask_out(Nanos) {}
const View* Views::view() const { return view_.members.empty() ? nullptr : &view_; }
bool Views::inside() const { return view_.has(config_.self); }
bool Views::frozen() const { return false; }
std::optional<std::span<const std::byte>> Views::card(Member) const { return std::nullopt; }
Views::Standing Views::standing(Nanos) const {
    Standing all;
    all.heard_at.assign(heard_.begin(), heard_.end());
    all.hears.resize(heard_.size());
    all.quorum = true;
    return all;
}

}  // namespace storm
