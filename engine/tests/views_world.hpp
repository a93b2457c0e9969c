// Processes that agree on views, over a network in memory under virtual time. Each has one session, which makes a step
// when all members of its view have begun it, as real ones do. Everything depends on the seed alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "views/views.hpp"

namespace storm {

class Dice {
public:
    explicit Dice(std::uint64_t seed) : state_(seed) {}
    std::uint64_t draw() {
        std::uint64_t z = state_ += 0x9e37'79b9'7f4a'7c15ULL;
        z = (z ^ (z >> 30)) * 0xbf58'476d'1ce4'e5b9ULL;
        z = (z ^ (z >> 27)) * 0x94d0'49bb'1331'11ebULL;
        return z ^ (z >> 31);
    }
    std::uint64_t below(std::uint64_t bound) { return draw() % bound; }
    bool chance(unsigned percent) { return below(100) < percent; }

private:
    std::uint64_t state_;
};

class World {
public:
    static constexpr Nanos silence = 10 * second;
    static constexpr std::uint32_t session = 7;

    struct Process {
        std::unique_ptr<Views> views;  // none: dead
        Member self;
        bool paused{}, asked_out{};
        std::vector<std::pair<std::uint16_t, std::vector<std::byte>>> held;  // notes that wait while it is paused
        std::uint32_t seen{};       // the latest view that its session has looked at
        View place;                 // the view in which its session works
        bool arrived{}, settled{};  // at the transition into that view
        std::uint64_t steps{};
        std::vector<std::pair<std::uint32_t, std::uint64_t>>
            past;  // views in which it was in place, and its steps then
        [[nodiscard]] bool began(std::uint64_t step, std::uint32_t number) const {
            if (place.number == number) return settled && steps >= step;
            return std::any_of(past.begin(), past.end(),
                               [&](const auto& each) { return each.first == number && each.second >= step; });
        }
        [[nodiscard]] bool runs() const { return views && !paused; }
    };
    struct Network {
        unsigned loss_percent{}, twice_percent{};
        Nanos delay{5 * millisecond}, jitter{};
    };

    World(std::uint16_t members, std::uint16_t capacity, std::uint64_t seed) : dice_(seed), seed_(seed) {
        processes_.resize(capacity);
        cut_.assign(capacity, Ranks{});
        std::vector<Member> all;
        for (std::uint16_t rank = 0; rank < members; ++rank) all.push_back({rank, 0});
        for (const Member who : all) start(who, all);
    }

    // --- what may happen -----------------------------------------------------------------------------------------
    Network network;
    void cut(std::uint16_t from, std::uint16_t to, bool dead = true) { cut_[from].set(to, dead); }
    void part(const Ranks& side) {
        for (std::uint16_t a = 0; a < capacity(); ++a) {
            for (std::uint16_t b = 0; b < capacity(); ++b) {
                if (side.has(a) != side.has(b)) cut(a, b);
            }
        }
    }
    void heal() { cut_.assign(capacity(), Ranks{}); }
    void kill(std::uint16_t rank) {
        processes_[rank].views.reset();
        processes_[rank].held.clear();
    }
    // It ends by itself, and says so to all whom it reaches.
    void close(std::uint16_t rank) {
        kill(rank);
        for (std::uint16_t to = 0; to < capacity(); ++to) {
            if (to != rank && at(to).runs() && !cut_[rank].has(to)) {
                at(to).views->on_goodbye(rank, now_);
                drain(to);
            }
        }
    }
    void pause(std::uint16_t rank) { processes_[rank].paused = true; }
    void resume(std::uint16_t rank) {
        Process& process = processes_[rank];
        if (!process.paused) return;
        process.paused = false;
        const auto held = std::exchange(process.held, {});
        for (const auto& [from, body] : held) {
            if (process.views) process.views->receive(from, body, now_);
        }
        if (process.views) step(rank);
    }
    // A process that nobody knows yet begins, and asks in through `sponsor`.
    void join(std::uint16_t rank, std::uint16_t sponsor) {
        const Member who{rank, processes_[rank].self.incarnation + 1};
        start(who, {});
        ask(rank, sponsor);
    }
    void ask(std::uint16_t rank, std::uint16_t sponsor) {
        const Member who = at(rank).self;
        const auto card = std::vector<std::byte>(4, static_cast<std::byte>(who.incarnation));
        if (!at(rank).runs() || !at(sponsor).runs()) return;
        at(rank).views->request_admission(who, card, now_);
        at(sponsor).views->request_admission(who, card, now_);
        drain(rank);
        drain(sponsor);
    }
    void leave(std::uint16_t rank) {
        at(rank).asked_out = true;
        if (at(rank).runs()) at(rank).views->request_leave(now_);
        drain(rank);
    }

    void anew(std::uint16_t rank) {
        if (at(rank).runs()) at(rank).views->request_view(now_);
        drain(rank);
    }

    void run_until(Nanos end) {
        while (true) {
            Nanos next = queue_.empty() ? never : queue_.front().at;
            std::uint16_t who = capacity();
            for (std::uint16_t rank = 0; rank < capacity(); ++rank) {
                if (!at(rank).runs()) continue;
                if (const Nanos timer = at(rank).views->next_timer(); timer < next) {
                    next = timer;
                    who = rank;
                }
            }
            if (next > end) break;
            now_ = std::max(now_, next);
            if (who < capacity()) {
                step(who);
            } else {
                deliver();
            }
            if (!violation_.empty()) return;
        }
        now_ = std::max(now_, end);
    }
    void run_for(Nanos time) { run_until(now_ + time); }

    // The session of a process does one thing that it can do now. True if it did.
    bool act(std::uint16_t rank) {
        Process& self = at(rank);
        if (!self.runs() || !self.views->inside()) return false;
        const View& latest = *self.views->view();
        if (latest.number != self.place.number) {
            const Start* start = latest.start(session);
            const std::uint64_t target = start == nullptr ? 0 : start->steps;
            const std::uint64_t steps_then = self.steps;
            if (self.views->blank(session)) {
                self.steps = target;
            } else if (self.steps < target) {
                return complete(rank, latest);
            } else if (self.steps > target) {
                fail("rank " + std::to_string(rank) + " is beyond the start of view " + std::to_string(latest.number));
                return false;
            }
            if (self.settled) self.past.emplace_back(self.place.number, steps_then);
            self.place = latest;
            self.arrived = true;
            self.settled = false;
            return true;
        }
        if (!self.settled) {
            for (const auto& list : {self.place.members, self.place.leaving}) {
                for (const Member who : list) {
                    const Process& other = at(who.rank);
                    const bool there = other.self == who && other.arrived && other.place.number >= self.place.number;
                    if (!there) return false;
                }
            }
            if (!self.views->advance({session, self.steps, self.place.number})) {
                // Who came in goes on to the start of the view with that, which it must not while it is frozen, nor where it
                // knows of a later view of which it only lacks the cards.
                const bool may = self.views->frozen() || self.views->latest().number > self.place.number;
                if (!self.views->blank(session) || !may) fail("settling was refused");
                return false;
            }
            self.settled = true;
            return true;
        }
        if (!self.place.has(self.self)) return false;
        return complete(rank, latest);
    }

    // --- what can be seen ----------------------------------------------------------------------------------------
    [[nodiscard]] Process& at(std::uint16_t rank) { return processes_[rank]; }
    [[nodiscard]] Nanos now() const { return now_; }
    [[nodiscard]] std::uint16_t capacity() const { return static_cast<std::uint16_t>(processes_.size()); }
    [[nodiscard]] const std::string& violation() const { return violation_; }
    [[nodiscard]] const std::map<std::uint32_t, View>& decided() const { return decided_; }
    [[nodiscard]] Dice& dice() { return dice_; }
    [[nodiscard]] std::uint64_t notes() const { return notes_; }
    // The view of a process; none of number 0.
    [[nodiscard]] View view(std::uint16_t rank) {
        const View* view = at(rank).views ? at(rank).views->view() : nullptr;
        return view == nullptr ? View{} : *view;
    }
    [[nodiscard]] Ranks members(std::uint16_t rank) { return view(rank).ranks(); }
    // Called with every note that is sent: a line of the trace.
    void (*trace)(const World&, std::uint16_t from, const OutgoingViewMessage&){};

private:
    struct Flight {
        Nanos at{};
        std::uint64_t order{};
        Member from;
        std::uint16_t to{};
        std::vector<std::byte> body;
        // For a heap whose first is the earliest.
        bool operator<(const Flight& other) const { return at != other.at ? at > other.at : order > other.order; }
    };

    void start(Member who, const std::vector<Member>& members) {
        Process& process = processes_[who.rank];
        process = {};
        process.self = who;
        process.views = std::make_unique<Views>(
            ViewsConfig{.self = who, .members = members, .capacity = capacity(), .silence = silence, .seed = seed_},
            now_);
        process.views->add_session({.session = session});
        process.views->watch(now_);
        look(who.rank);
        process.place = view(who.rank);
        process.settled = process.arrived = !members.empty();
    }

    void step(std::uint16_t rank) {
        at(rank).views->tick(now_);
        drain(rank);
    }

    void drain(std::uint16_t rank) {
        Process& process = at(rank);
        if (!process.views) return;
        while (auto note = process.views->take_view_message()) {
            ++notes_;
            if (trace != nullptr) trace(*this, rank, *note);
            if (cut_[rank].has(note->to)) continue;
            const unsigned copies = network.twice_percent != 0 && dice_.chance(network.twice_percent) ? 2 : 1;
            for (unsigned copy = 0; copy < copies; ++copy) {
                if (network.loss_percent != 0 && dice_.chance(network.loss_percent)) continue;
                Nanos delay = network.delay;
                if (network.jitter != 0)
                    delay += static_cast<Nanos>(dice_.below(static_cast<std::uint64_t>(network.jitter)));
                queue_.push_back({now_ + delay, order_++, process.self, note->to,
                                  copy + 1 == copies ? std::move(note->body) : note->body});
                std::push_heap(queue_.begin(), queue_.end());
            }
        }
        look(rank);
    }

    void deliver() {
        std::pop_heap(queue_.begin(), queue_.end());
        Flight flight = std::move(queue_.back());
        queue_.pop_back();
        Process& process = at(flight.to);
        if (!process.views || cut_[flight.from.rank].has(flight.to)) return;
        if (process.paused) {
            if (process.held.size() < 64) process.held.emplace_back(flight.from.rank, std::move(flight.body));
            return;
        }
        process.views->receive(flight.from.rank, flight.body, now_);
        drain(flight.to);
    }

    // Completes a step in the view of the session, unless some member that `latest` still has did not begin it.
    bool complete(std::uint16_t rank, const View& latest) {
        Process& self = at(rank);
        for (const Member who : self.place.members) {
            if (latest.number > self.place.number && !latest.has(who)) continue;
            const Process& other = at(who.rank);
            if (other.self != who || !other.began(self.steps, self.place.number)) return false;
        }
        const std::uint32_t settled = self.settled ? self.place.number : 0;
        if (!self.views->advance({session, self.steps + 1, settled})) return false;
        ++self.steps;
        check_step(rank);
        return true;
    }

    // Invariant: whoever goes on in the next view stops at its start; whoever does not gets no further than the step that
    // those who do had begun already, which they make again.
    void check_step(std::uint16_t rank) {
        const Process& self = at(rank);
        if (!self.place.has(self.self) && !self.place.is_leaving(self.self))
            fail("rank " + std::to_string(rank) + " made a step in a view it is not in");
        const auto next = decided_.upper_bound(self.place.number);
        if (next != decided_.end()) check_overtaken(rank, next->second);
    }
    void check_overtaken(std::uint16_t rank, const View& next) {
        const Process& self = at(rank);
        const Start* start = next.start(session);
        if (start == nullptr || self.views->blank(session)) return;
        const bool goes_on = (next.has(self.self) && !next.has_joined(self.self)) || next.is_leaving(self.self);
        if (self.steps > start->steps + (goes_on ? 0 : 1))
            fail("rank " + std::to_string(rank) + " made step " + std::to_string(self.steps) + " of view " +
                 std::to_string(self.place.number) + ", but view " + std::to_string(next.number) + " begins at " +
                 std::to_string(start->steps));
    }

    // Looks at the view of a process, and at whether it agrees with all others.
    void look(std::uint16_t rank) {
        Process& self = at(rank);
        const View* view = self.views ? &self.views->latest() : nullptr;
        if (view == nullptr || view->number == self.seen) return;
        if (view->number < self.seen) fail("rank " + std::to_string(rank) + " went back to an older view");
        self.seen = view->number;
        const auto [found, fresh] = decided_.try_emplace(view->number, *view);
        if (!fresh) {
            if (!(found->second == *view)) fail("two views have the number " + std::to_string(view->number));
            return;
        }
        for (std::uint16_t each = 0; each < capacity(); ++each) {
            const Process& other = at(each);
            const auto next = decided_.upper_bound(other.place.number);
            if (other.views && other.place.number != 0 && next != decided_.end() && next->first == view->number &&
                other.place.has(other.self))
                check_overtaken(each, *view);
        }
    }

    void fail(std::string what) {
        if (violation_.empty()) violation_ = std::move(what);
    }

    Dice dice_;
    std::uint64_t seed_;
    Nanos now_{second};
    std::uint64_t order_{}, notes_{};
    std::vector<Process> processes_;
    std::vector<Ranks> cut_;  // by sender: whom it does not reach
    std::vector<Flight> queue_;
    std::map<std::uint32_t, View> decided_;
    std::string violation_;
};

}  // namespace storm
