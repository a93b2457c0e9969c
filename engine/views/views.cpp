#include "views/views.hpp"

#include <algorithm>
#include <stdexcept>

namespace storm {
namespace {

constexpr Nanos first_join_backoff = second, longest_join_backoff = 30 * second, long_inside = 60 * second;
// A join request is forgotten after this time; a process that still wants to join sends another.
constexpr Nanos join_request_lifetime = 15 * second;
// Only every so many heartbeats also go to processes outside the view.
constexpr unsigned outsider_beats = 5;

}  // namespace

Views::Views(const ViewsConfig& config, Nanos now)
    : self_(config.self),
      capacity_(config.capacity),
      silence_(config.silence),
      period_(config.silence / 10),
      random_(config.seed * 0x9e37'79b9'7f4a'7c15ULL + config.self.rank),
      net_(config.self.rank, config.capacity, config.silence),
      slots_(config.capacity),
      last_tick_(now),
      join_request_at_(now),
      join_backoff_(first_join_backoff),
      inside_since_(now) {
    if (config.capacity > Ranks::bits) throw std::invalid_argument("views have at most 256 slots");
    if (config.self.rank >= config.capacity) throw std::invalid_argument("own rank must be below the number of slots");
    slots_[self_.rank].incarnation = self_.incarnation;
    if (config.members.empty()) return;
    latest_.number = config.number;
    latest_.members = config.members;
    std::sort(latest_.members.begin(), latest_.members.end());
    for (const Member who : latest_.members) {
        if (who.rank >= capacity_) throw std::invalid_argument("a member's rank must be below the number of slots");
        if (who.rank != self_.rank) slots_[who.rank] = {.incarnation = who.incarnation};
    }
    update_usable();
}

void Views::watch(Nanos now) {
    if (watching_) return;
    watching_ = dirty_ = true;
    last_tick_ = beat_at_ = now;
    for (const Member who : latest_.members) net_.trust(who.rank, now);
    if (lacks_cards()) cards_at_ = now;
}

bool Views::watching() const { return watching_; }

void Views::on_received(std::uint16_t from, Nanos now) {
    if (from >= capacity_) return;
    net_.on_received(from, now);
    if (!refused_.has(from)) return;
    refused_.remove(from);
    dirty_ = true;
}

void Views::refused(std::uint16_t from, Nanos now) {
    if (from >= capacity_ || from == self_.rank) return;
    refused_.add(from);
    last_tick_ = std::max(last_tick_, now);
    dirty_ = true;
}

void Views::on_goodbye(std::uint16_t from, Nanos now) {
    if (from >= capacity_ || from == self_.rank) return;
    net_.on_goodbye(from);
    slots_[from].flags = 0;
    last_tick_ = std::max(last_tick_, now);
    dirty_ = true;
}

void Views::blocked(std::uint16_t from, Nanos now) {
    if (from < capacity_) net_.blocked(from, now);
}

void Views::readmitted(Member who, Nanos now) {
    if (who.rank < capacity_ && who.rank != self_.rank) occupy(who, now);
}

// A process claims the slot. It gets it unless a newer process is known there.
void Views::occupy(Member who, Nanos now) {
    SlotState& slot = slots_[who.rank];
    if (who.incarnation < slot.incarnation) return;
    if (who.incarnation > slot.incarnation) {
        slot = {.incarnation = who.incarnation};
        net_.reset(who.rank);
        refused_.remove(who.rank);
        // The promises of a proposal count only for the processes that it began with.
        if (proposal_ && voters().has(who.rank)) abort_proposal(now);
        dirty_ = true;
    }
    if (latest_.has(who) && !net_.last_received_at(who.rank)) net_.trust(who.rank, now);
}

void Views::receive(std::uint16_t from, std::span<const std::byte> body, Nanos now) {
    if (from >= capacity_ || from == self_.rank || body.size() > most_view_message_bytes) return;
    const std::optional<ViewMessage> message = parse_view_message(body, capacity_);
    if (!message || message->incarnation < slots_[from].incarnation) return;
    occupy({from, message->incarnation}, now);
    if (net_.left().has(from)) return;
    watch(now);
    on_received(from, now);
    if (message->number > slots_[from].number) {
        slots_[from].number = message->number;
        dirty_ = true;  // its join request counts from now on, as it knows this view only now
    }
    catch_up(from, *message, now);
    switch (message->kind) {
        case ViewMessageKind::beat: on_beat(from, *message, now); break;
        case ViewMessageKind::prepare: on_prepare(from, *message, now); break;
        case ViewMessageKind::propose: on_propose(from, *message, now); break;
        case ViewMessageKind::promise:
            if (!proposal_ || message->ballot != proposal_->ballot) break;
            proposal_->on_promise(from, message->accepted, message->positions, (message->flags & view_flag_blank) == 0);
            try_vote(now);
            break;
        case ViewMessageKind::value:
            if (!proposal_ || message->number != latest_.number) break;
            proposal_->on_value(message->ballot, message->view);
            try_vote(now);
            break;
        case ViewMessageKind::accepted:
            if (!proposal_ || !proposal_->voting || message->ballot != proposal_->ballot) break;
            proposal_->accepted.add(from);
            try_decide(now);
            break;
        case ViewMessageKind::refusal:
            round_ = std::max(round_, message->ballot.round);
            if (proposal_ && message->number == latest_.number && message->ballot > proposal_->ballot)
                abort_proposal(now);
            break;
        case ViewMessageKind::record: on_record(message->view, now); break;
        case ViewMessageKind::request:
            if (const Card* found = find_card(message->who)) {
                ViewMessage reply = make(ViewMessageKind::card);
                reply.who = found->who;
                reply.card = found->bytes;
                send(from, reply);
            }
            break;
        case ViewMessageKind::card: on_card(*message); break;
    }
}

void Views::on_record(const View& view, Nanos now) {
    if (view.number <= latest_.number) return;
    // A process that accepted a view in its predecessor's stead belongs to that lineage of views. It must not install a
    // view of a lineage that it has left.
    if (!is_participant() && acceptor_.accepted && view.number < acceptor_.value.number) return;
    install(view, now);
}

// When two processes have different views, the one with the later view sends it. Views in between are not needed.
void Views::catch_up(std::uint16_t from, const ViewMessage& message, Nanos now) {
    SlotState& slot = slots_[from];
    const Nanos gap = silence_ / 40;
    if (message.number < latest_.number && now >= slot.record_sent_at + gap) {
        slot.record_sent_at = now;
        ViewMessage record = make(ViewMessageKind::record);
        record.view = latest_;
        send(from, record);
    } else if (message.number > latest_.number && message.kind != ViewMessageKind::record &&
               now >= slot.request_sent_at + gap) {
        slot.request_sent_at = now;
        ViewMessage poke = make(ViewMessageKind::beat);
        poke.reachable = net_.reachable();
        send(from, poke);
    }
}

void Views::on_beat(std::uint16_t from, const ViewMessage& message, Nanos now) {
    net_.report(from, message.reachable, now);
    if (slots_[from].flags != message.flags) {
        // The frozen flag is for display only.
        if (((slots_[from].flags ^ message.flags) & ~view_flag_frozen) != 0) dirty_ = true;
        slots_[from].flags = message.flags;
    }
    for (const Member who : message.join_requests) {
        add_join_request(who, now, now + silence_, false);
        if (who == self_ || who.incarnation == 0 || find_card(who) != nullptr ||
            now < slots_[from].request_sent_at + period_)
            continue;
        slots_[from].request_sent_at = now;
        ViewMessage request = make(ViewMessageKind::request);
        request.who = who;
        send(from, request);
    }
}

void Views::on_card(const ViewMessage& message) {
    // Keeps only cards of members and joiners, so that strangers cannot fill the memory.
    const bool needed =
        latest_.has(message.who) || std::any_of(join_requests_.begin(), join_requests_.end(),
                                                [&](const JoinRequest& pending) { return pending.who == message.who; });
    if (!needed || find_card(message.who) != nullptr || message.card.empty()) return;
    cards_.push_back({message.who, message.card});
    dirty_ = true;
    update_usable();
}

void Views::tick(Nanos now) {
    if (!watching_) return;
    if (now - last_tick_ > silence_ / 2) {
        net_.slept(now);
        wanted_since_ = never;
        active_at_ = now;
        if (proposal_) abort_proposal(now);
    }
    last_tick_ = std::max(last_tick_, now);
    net_.refresh(now);
    if (net_.take_changed()) {
        dirty_ = true;
        beat_at_ = std::min(beat_at_, std::max(now, last_beat_at_ + period_ / 4));
    }
    if (std::erase_if(join_requests_, [&](const JoinRequest& pending) { return pending.until <= now; }) > 0)
        dirty_ = true;
    if (now >= beat_at_) beat(now);
    if (now >= cards_at_) fetch_cards(now);
    if (proposal_) drive(now);
    if (dirty_ || now >= consider_at_) consider(now);
}

Nanos Views::next_timer() const {
    if (!watching_) return never;
    if (dirty_ || net_.changed()) return last_tick_;
    Nanos next = std::min({beat_at_, consider_at_, cards_at_, net_.next_silence()});
    if (proposal_) next = std::min(next, proposal_->resend_at);
    return next;
}

std::optional<OutgoingViewMessage> Views::take_view_message() {
    if (out_.empty()) return std::nullopt;
    OutgoingViewMessage message = std::move(out_.front());
    out_.pop_front();
    return message;
}

void Views::beat(Nanos now) {
    last_beat_at_ = now;
    beat_at_ = now + period_;
    const bool outsiders_too = beats_++ % outsider_beats == 0 || !is_participant();
    ViewMessage message = make(ViewMessageKind::beat);
    message.reachable = net_.reachable();
    message.flags =
        static_cast<std::uint8_t>((frozen() ? view_flag_frozen : 0) | (wants_join(now) ? view_flag_wants_join : 0) |
                                  (wants_leave_ ? view_flag_wants_leave : 0));
    for (const JoinRequest& pending : join_requests_) {
        if (pending.own && message.join_requests.size() < most_join_requests)
            message.join_requests.push_back(pending.who);
    }
    const std::vector<std::byte> body = write_view_message(message);
    const Ranks listed = voters();
    for (std::uint16_t rank = 0; rank < capacity_; ++rank) {
        if (rank == self_.rank || net_.left().has(rank)) continue;
        // Slots outside the view get heartbeats too: a process there may have been partitioned from us for long.
        if (outsiders_too || listed.has(rank)) out_.push_back({rank, body});
    }
}

void Views::add_session(const Position& position) {
    remove_session(position.session);
    if (sessions_.size() >= most_sessions) throw std::length_error("a process has at most 24 sessions at a time");
    const bool begun = latest_.start(position.session) != nullptr;
    sessions_.push_back({.position = position,
                         .place = begun ? position.settled : std::max(position.settled, latest_.number),
                         .blank = begun && position.settled == 0});
}

bool Views::advance(const Position& position) {
    const auto found = std::find_if(sessions_.begin(), sessions_.end(),
                                    [&](const Session& each) { return each.position.session == position.session; });
    if (found == sessions_.end()) return false;
    const Start* start = latest_.start(position.session);
    // A view that all start the next one from is settled, also if this process learns that only with the next view.
    const bool settles = is_participant() && (position.settled == latest_.number ||
                                              (start != nullptr && position.settled == start->base &&
                                               position.settled > found->place && !latest_.has_joined(self_)));
    const std::uint32_t place = settles ? position.settled : found->place;
    if (position.steps != found->position.steps) {
        if (frozen() || !is_participant()) return false;
        if (place < latest_.number || latest_.is_leaving(self_)) {
            if (position.steps > (start == nullptr ? found->position.steps : start->steps)) return false;
        }
        found->position.steps = position.steps;
    }
    found->place = place;
    if (settles) {
        found->position.settled = position.settled;
        found->blank = blank_ = false;
    }
    return true;
}

void Views::remove_session(std::uint32_t session) {
    std::erase_if(sessions_, [&](const Session& each) { return each.position.session == session; });
}

bool Views::blank(std::uint32_t session) const {
    return std::any_of(sessions_.begin(), sessions_.end(),
                       [&](const Session& each) { return each.position.session == session && each.blank; });
}

void Views::request_admission(Member who, std::span<const std::byte> card, Nanos now) {
    if (who.rank >= capacity_)
        throw std::invalid_argument("the rank that asks to join must be below the number of slots");
    if (card.size() > most_card_bytes) throw std::invalid_argument("a card has at most 400 bytes");
    if (find_card(who) == nullptr) cards_.push_back({who, {card.begin(), card.end()}});
    update_usable();
    if (who == self_) {
        wants_leave_ = false;
        dirty_ = true;
        return;
    }
    add_join_request(who, now, now + join_request_lifetime, true);
    watch(now);
    beat_at_ = now;
}

void Views::request_leave(Nanos now) {
    wants_leave_ = dirty_ = true;
    watch(now);
    beat_at_ = now;
}

void Views::request_view(Nanos now) {
    wants_new_view_ = dirty_ = true;
    watch(now);
    beat_at_ = now;
}

void Views::add_join_request(Member who, Nanos now, Nanos until, bool own) {
    if (who.rank == self_.rank || latest_.has(who) || who.incarnation < slots_[who.rank].incarnation) return;
    if (who.incarnation > slots_[who.rank].incarnation) occupy(who, now);
    for (JoinRequest& pending : join_requests_) {
        if (pending.who.rank != who.rank) continue;
        if (pending.who.incarnation > who.incarnation) return;
        if (pending.who != who) dirty_ = true;
        pending = {who, std::max(until, pending.who == who ? pending.until : 0),
                   own || (pending.who == who && pending.own)};
        return;
    }
    if (join_requests_.size() >= most_join_requests) return;
    join_requests_.push_back({who, until, own});
    dirty_ = true;
}

// Installs a decided view. It may come from its proposer, or much later from any process.
void Views::install(const View& view, Nanos now) {
    const bool was_inside = is_participant();
    latest_ = view;
    acceptor_ = {};
    proposal_.reset();
    failures_ = 0;
    proposer_backoff_ = 0;
    wanted_since_ = consider_at_ = never;
    wants_new_view_ = false;
    for (const Member who : view.members) {
        if (who.rank == self_.rank) continue;
        occupy(who, now);
        if (view.has_joined(who)) net_.trust(who.rank, now);
    }
    std::erase_if(join_requests_, [&](const JoinRequest& pending) {
        const Member* present = view.at(pending.who.rank);
        return present != nullptr && present->incarnation >= pending.who.incarnation;
    });
    std::erase_if(cards_, [&](const Card& card) {
        return card.who != self_ && !view.has(card.who) && !usable_.has(card.who) &&
               std::none_of(join_requests_.begin(), join_requests_.end(),
                            [&](const JoinRequest& pending) { return pending.who == card.who; });
    });
    if (view.has_joined(self_)) {
        // The state of this process belongs to an earlier membership and must be discarded.
        for (Session& each : sessions_) each = {.position = {.session = each.position.session}, .blank = true};
        for (const Member who : view.members) net_.trust(who.rank, now);
        inside_since_ = now;
        blank_ = true;
    } else if (was_inside && !is_participant()) {
        join_backoff_ =
            now - inside_since_ < long_inside ? std::min(2 * join_backoff_, longest_join_backoff) : first_join_backoff;
        join_request_at_ = now + join_backoff_;
    }
    update_usable();
    cards_at_ = lacks_cards() ? now : never;
    beat_at_ = now;
    dirty_ = true;
}

void Views::update_usable() {
    if (latest_.number != 0 && !lacks_cards()) usable_ = latest_;
}

const View* Views::view() const { return usable_.number == 0 ? nullptr : &usable_; }

bool Views::is_participant() const { return latest_.has(self_) || latest_.is_leaving(self_); }

bool Views::inside() const { return is_participant() && (usable_.has(self_) || usable_.is_leaving(self_)); }

bool Views::frozen() const { return is_participant() && static_cast<bool>(acceptor_.promised); }

// A process outside the view asks to join, unless it wants to leave or another process has its slot.
bool Views::wants_join(Nanos now) const {
    const Member* present = latest_.at(self_.rank);
    const bool replaced = present != nullptr && present->incarnation > self_.incarnation;
    return !is_participant() && !wants_leave_ && !replaced && now >= join_request_at_;
}

const Views::Card* Views::find_card(Member who) const {
    for (const Card& card : cards_) {
        if (card.who == who) return &card;
    }
    return nullptr;
}

std::optional<std::span<const std::byte>> Views::card(Member who) const {
    const Card* found = find_card(who);
    return found == nullptr ? std::nullopt : std::optional<std::span<const std::byte>>(found->bytes);
}

std::vector<Member> Views::join_requests() const {
    std::vector<Member> all;
    for (const JoinRequest& pending : join_requests_) {
        if (find_card(pending.who) != nullptr) all.push_back(pending.who);
    }
    return all;
}

bool Views::lacks_cards() const {
    return std::any_of(latest_.members.begin(), latest_.members.end(),
                       [&](Member who) { return who.incarnation != 0 && who != self_ && find_card(who) == nullptr; });
}

// Requests the missing cards from one member after the other.
void Views::fetch_cards(Nanos now) {
    cards_at_ = lacks_cards() ? now + silence_ / 40 : never;
    if (cards_at_ == never) return;
    for (const Member who : latest_.members) {
        if (who.incarnation == 0 || who == self_ || find_card(who) != nullptr) continue;
        const std::uint16_t helper = latest_.members[next_helper_++ % latest_.members.size()].rank;
        // The process itself may be asked too: with two members there is no other helper, and its address may be known
        // by other means.
        if (helper == self_.rank) continue;
        ViewMessage request = make(ViewMessageKind::request);
        request.who = who;
        send(helper, request);
    }
}

ViewMessage Views::make(ViewMessageKind kind) const {
    ViewMessage message;
    message.kind = kind;
    message.incarnation = self_.incarnation;
    message.number = latest_.number;
    return message;
}

void Views::send(std::uint16_t to, const ViewMessage& message) { out_.push_back({to, write_view_message(message)}); }

Views::MembershipStatus Views::connectivity(Nanos now) const {
    MembershipStatus connectivity;
    for (std::uint16_t rank = 0; rank < capacity_; ++rank) {
        connectivity.last_received_at.push_back(rank == self_.rank ? std::optional(now) : net_.last_received_at(rank));
        connectivity.reachable.emplace_back();
        for (const std::uint16_t each : net_.reported(rank)) connectivity.reachable.back().push_back(each);
    }
    connectivity.quorum = is_quorum(latest_, alive());
    connectivity.proposing = proposing();
    connectivity.requesting_join = watching_ && wants_join(now);
    return connectivity;
}

}  // namespace storm
