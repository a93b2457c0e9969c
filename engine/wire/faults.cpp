#include "wire/faults.hpp"

#include <bit>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <string>

namespace storm {
namespace {

// Settings such as loss 0.9 with burst 9 lie on the edge of what is feasible; rounding must not push them over it.
constexpr double feasible = 1.0 + 1e-9;
// After this many changes of state during one pause, a timed link has forgotten its initial state. Its state is then
// drawn at random, which bounds the cost of a long pause.
constexpr int most_changes = 1000;

[[noreturn]] void reject(std::string_view where, const std::string& why) {
    throw std::invalid_argument(std::string(where) + why);
}

template <class T>
std::string text(T value) {
    std::ostringstream out;
    out << value;
    return out.str();
}

// The conditions are written so that NaN fails them.
void check_chance(std::string_view where, const char* knob, double value) {
    if (!(value >= 0.0 && value <= 1.0)) reject(where, std::string(knob) + " must lie in [0, 1], got " + text(value));
}

void check_delay(std::string_view where, const char* knob, Nanos value) {
    if (value < 0 || value > max_fault_delay)
        reject(where, std::string(knob) + " must lie in [0, 1 h], got " + text(value) + " ns");
}

// Chance to enter the bad state, such that it lasts `burst` datagrams on average and covers the fraction `loss` of
// time.
double burst_entry(double loss, double burst) { return loss / ((1.0 - loss) * burst); }

// The finaliser of splitmix64, a bijection: different links of one seed can never share a state.
std::uint64_t mix(std::uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
    return x ^ (x >> 31);
}

constexpr std::uint64_t golden_gamma = 0x9e3779b97f4a7c15U;

// Random bits as a number in [0, 1).
double fraction(std::uint64_t bits) { return static_cast<double>(bits >> 11) * 0x1.0p-53; }

LinkFaults validated(LinkFaults faults) {
    faults.validate();
    return faults;
}

}  // namespace

void LinkFaults::validate(std::string_view where) const {
    check_chance(where, "loss", loss);
    check_chance(where, "shared", shared);
    check_chance(where, "duplicate", duplicate);
    check_chance(where, "reorder", reorder);
    check_chance(where, "corrupt", corrupt);
    check_delay(where, "delay", delay);
    check_delay(where, "jitter", jitter);
    if (!(burst >= 1.0 && std::isfinite(burst)))
        reject(where, "burst must be finite and at least 1, got " + text(burst));
    for (const std::uint8_t bit : trace)
        if (bit > 1) reject(where, "trace must hold 0 (arrived) and 1 (lost), got " + text(+bit));
    check_delay(where, "burst_time", burst_time);
    if (burst_time > 0 && trace.empty()) {
        if (burst != 1.0)
            reject(where, "burst must be 1 beside burst_time: bursts have one mean length, in datagrams or in time");
        if (loss >= 1.0)
            reject(where,
                   "burst_time must be 0 when loss is 1 (a dead link has no bursts), got " + text(burst_time) + " ns");
    }
    if (burst > 1.0 && trace.empty()) {
        if (loss >= 1.0)
            reject(where, "burst must be 1 when loss is 1 (a dead link has no bursts), got " + text(burst));
        if (burst_entry(loss, burst) > feasible)
            reject(where, "burst " + text(burst) + " is too short for loss " + text(loss) + ": it must be at least " +
                              text(loss / (1.0 - loss)) + ", or 1 for independent loss");
    }
}

FaultyLink::FaultyLink(LinkFaults faults, std::uint64_t seed, std::uint16_t source, std::uint16_t target)
    : FaultyLink(std::make_shared<const LinkFaults>(validated(std::move(faults))), seed, source, target) {}

FaultyLink::FaultyLink(std::shared_ptr<const LinkFaults> faults, std::uint64_t seed, std::uint16_t source,
                       std::uint16_t target)
    : faults_(std::move(faults)), seed_(seed), source_(source), target_(target) {
    std::uint64_t x = mix(mix(seed + golden_gamma) ^ ((std::uint64_t{source} << 16) | target));
    for (std::uint64_t& word : state_) word = mix(x += golden_gamma);

    // The bit above is_lost_at_source's two keeps this apart from the other seeds.
    timed_state_ = mix(mix(seed + golden_gamma) ^ (std::uint64_t{1} << 34 | std::uint64_t{source} << 16 | target));

    if (faults_->burst > 1.0 && faults_->loss < 1.0) {
        enter_burst_ = burst_entry(faults_->loss, faults_->burst);
        leave_burst_ = 1.0 / faults_->burst;
    }
    // A stationary start: the first datagram is lost as often as any other. Both draws are made whatever the settings,
    // as in next().
    const double start = uniform(), offset = uniform();
    in_burst_ = start < faults_->loss;
    trace_at_ = static_cast<std::size_t>(offset * static_cast<double>(faults_->trace.size()));
}

// xoshiro256** of Blackman and Vigna (public domain).
std::uint64_t FaultyLink::draw() {
    const std::uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
    const std::uint64_t t = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= t;
    state_[3] = std::rotl(state_[3], 45);
    return result;
}

double FaultyLink::uniform() { return fraction(draw()); }

double FaultyLink::timed_uniform() { return fraction(mix(timed_state_ += golden_gamma)); }

// An exponentially distributed time. Its mean is `burst_time` in the bad state, and in the good state so long that the
// bad state covers the fraction `loss` of time.
Nanos FaultyLink::time_in_state() {
    const double bad = static_cast<double>(faults_->burst_time), p = faults_->loss;
    const double time = -std::log1p(-timed_uniform()) * (in_burst_ ? bad : bad * (1.0 - p) / p);
    constexpr double century = 3.2e18;  // rare bursts must not overflow
    return static_cast<Nanos>(std::ceil(std::min(time, century)));
}

bool FaultyLink::in_burst_at(Nanos now) {
    if (faults_->loss <= 0.0) return false;
    int changes = seen_ == 1 ? most_changes : 0;
    for (; state_ends_ <= now && changes < most_changes; ++changes) {
        in_burst_ = !in_burst_;
        state_ends_ += time_in_state();
    }
    if (changes == most_changes) {
        in_burst_ = timed_uniform() < faults_->loss;
        state_ends_ = now + time_in_state();
    }
    return in_burst_;
}

bool FaultyLink::next_is_lost(double u, Nanos now) {
    if (!faults_->trace.empty()) {
        const bool lost = faults_->trace[trace_at_] != 0;
        if (++trace_at_ == faults_->trace.size()) trace_at_ = 0;
        return lost;
    }
    if (faults_->burst_time > 0) return in_burst_at(now);
    if (faults_->burst == 1.0) return u < faults_->loss;
    const bool lost = in_burst_;
    in_burst_ = in_burst_ ? u >= leave_burst_ : u < enter_burst_;
    return lost;
}

// In a first pass, all receivers of a collective get the same exchange and chunk. The link's own random sequence is not
// used: the bit above its two ranks keeps this seed apart from the links' seeds.
bool FaultyLink::is_lost_at_source(const Header* header) const {
    const bool first_pass = header != nullptr && header->kind == Kind::data && (header->flags & flag_repair) == 0;
    std::uint64_t x = mix(seed_ + golden_gamma) ^ (std::uint64_t{1} << 32) ^ (std::uint64_t{source_} << 16);
    if (first_pass) {
        const std::uint64_t stage = header->flags & flag_second_stage;
        x = mix(mix(x) + exchange_key(header->channel, header->seq));
        x = mix(x + golden_gamma + (std::uint64_t{header->chunk} << 1 | stage));
    } else {
        x = mix(mix(x ^ (std::uint64_t{1} << 33) ^ target_) + golden_gamma * seen_);
    }
    return fraction(x) < faults_->shared;
}

// Every datagram takes the same seven draws, needed or not: adding duplicates to a setting must not change which
// datagrams are lost.
Fate FaultyLink::next(Nanos now, const Header* header) {
    const double loss = uniform(), duplicate = uniform(), reorder = uniform(), corrupt = uniform();
    const double depth = uniform(), jitter = uniform();
    const std::uint64_t bit = draw();

    ++seen_;
    const bool lost_at_source = shares() && is_lost_at_source(header);
    if (next_is_lost(loss, now) || lost_at_source) {
        ++lost_;
        return Fate{.lost = true, .copies = 0};
    }
    Fate fate;
    if (duplicate < faults_->duplicate) fate.copies = 2;
    if (reorder < faults_->reorder) fate.behind = 1 + static_cast<std::uint32_t>(depth * reorder_depth);
    fate.corrupted = corrupt < faults_->corrupt;
    if (fate.corrupted) fate.corrupt_bit = static_cast<std::uint32_t>(bit >> 32);
    fate.delay = faults_->delay + static_cast<Nanos>(jitter * (static_cast<double>(faults_->jitter) + 1.0));
    return fate;
}

const LinkFaults& FaultSettings::link(std::uint16_t source, std::uint16_t target) const {
    const auto found = links.find({source, target});
    return found == links.end() ? default_link : found->second;
}

void FaultSettings::validate() const {
    default_link.validate();
    for (const auto& [ends, faults] : links)
        faults.validate("link " + std::to_string(ends.first) + " -> " + std::to_string(ends.second) + ": ");
}

void FaultPath::set(std::shared_ptr<const FaultSettings> settings, Nanos now) {
    if (settings == settings_) return;
    if (settings != nullptr) settings->validate();

    // Arrival numbers and orders of entry come from one counter, so datagrams that enter the delay stage from now on
    // sort behind.
    std::map<std::pair<Nanos, std::uint64_t>, HeldDatagram> due_now;
    for (auto& entry : delayed_) due_now.emplace(std::pair(now, entry.second.arrival), std::move(entry.second));
    for (HeldDatagram& held : waiting_) due_now.emplace(std::pair(now, held.arrival), std::move(held));
    delayed_ = std::move(due_now);
    links_.clear();
    waiting_.clear();
    settings_ = std::move(settings);
}

FaultPath::SourceState& FaultPath::link_from(std::uint16_t source) {
    if (source >= links_.size()) links_.resize(std::size_t{source} + 1);
    std::unique_ptr<SourceState>& link = links_[source];
    if (link == nullptr) {
        // Shares the ownership of the settings, points at the link's part of them.
        std::shared_ptr<const LinkFaults> faults(settings_, &settings_->link(source, rank_));
        link.reset(new SourceState{
            .fates = FaultyLink(std::move(faults), settings_->seed + (std::uint64_t{lane_} << 48), source, rank_)});
    }
    return *link;
}

void FaultPath::apply_faults(std::uint16_t source, std::span<std::byte> datagram, Nanos now, const Sink& deliver) {
    SourceState& link = link_from(source);
    const std::optional<Header> header = link.fates.shares() ? parse_header(datagram) : std::nullopt;
    const Fate fate = link.fates.next(now, header ? &*header : nullptr);
    ++counters_.seen;
    if (fate.lost) {
        ++counters_.lost;
        return;
    }
    ++link.arrived;
    if (fate.behind > 0) ++counters_.reordered;
    if (fate.copies > 1) {
        // Copy now: the first copy may be corrupted below, and the core may decrypt it in place.
        copy_.assign(datagram.begin(), datagram.end());
        ++counters_.duplicated;
    }
    if (fate.corrupted && !datagram.empty()) {
        const std::size_t bit = fate.corrupt_bit % (std::min(datagram.size(), corruptible_bytes_) * 8);
        datagram[bit / 8] ^= std::byte{1} << (bit % 8);
        ++counters_.corrupted;
    }
    pass_or_hold(source, link, datagram, fate, now, deliver);
    if (fate.copies > 1) pass_or_hold(source, link, copy_, fate, now, deliver);

    // Waiting datagrams count this one even if it is held back itself. Otherwise reorder = 1 would hold everything.
    for (std::size_t i = 0; i < link.waiting.size();) {
        const auto waiter = link.waiting[i];
        if (waiter->leaves_with > link.arrived) {
            ++i;
            continue;
        }
        HeldDatagram held = std::move(*waiter);
        waiting_.erase(waiter);
        link.waiting.erase(link.waiting.begin() + static_cast<std::ptrdiff_t>(i));
        if (held.delay > 0) {
            const Nanos due = now + held.delay;
            delay_until(due, std::move(held));
        } else {
            deliver_held(std::move(held), deliver);
        }
    }
}

void FaultPath::pass_or_hold(std::uint16_t source, SourceState& link, std::span<std::byte> datagram, const Fate& fate,
                             Nanos now, const Sink& deliver) {
    if (fate.behind == 0 && fate.delay == 0) {
        deliver(datagram);
        return;
    }
    if (held_datagrams_ == max_held_datagrams || datagram.size() > max_held_bytes - held_bytes_) {
        ++counters_.dropped;
        return;
    }
    HeldDatagram held{.bytes = {datagram.begin(), datagram.end()},
                      .arrival = ++order_,
                      .leaves_with = link.arrived + fate.behind,
                      .source = source,
                      .expires = now + reorder_timeout,
                      .delay = fate.delay};
    ++counters_.held;
    ++held_datagrams_;
    held_bytes_ += datagram.size();
    if (fate.behind > 0)
        link.waiting.push_back(waiting_.insert(waiting_.end(), std::move(held)));
    else
        delay_until(now + fate.delay, std::move(held));
}

// `held` is passed by value: `deliver` may throw, and by then the datagram must be out of every structure and every
// count.
void FaultPath::deliver_held(HeldDatagram held, const Sink& deliver) {
    --held_datagrams_;
    held_bytes_ -= held.bytes.size();
    deliver(held.bytes);
}

void FaultPath::release_due(Nanos now, const Sink& deliver) {
    while (!waiting_.empty() && waiting_.front().expires <= now) {
        std::erase(links_[waiting_.front().source]->waiting, waiting_.begin());
        HeldDatagram held = std::move(waiting_.front());
        waiting_.pop_front();
        // Count from the end of its wait, not from now: the due time must not depend on how often `release` is called.
        const Nanos due = held.expires + held.delay;
        delay_until(due, std::move(held));
    }
    while (!delayed_.empty() && delayed_.begin()->first.first <= now)
        deliver_held(std::move(delayed_.extract(delayed_.begin()).mapped()), deliver);
}

}  // namespace storm
