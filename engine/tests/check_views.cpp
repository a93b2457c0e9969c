// Checks the agreement on views by random schedules: loss, delay, duplicates, dead links, partitions, deaths, restarts,
// pauses, joins and leaves, from a seed. Says how many schedules it ran and how fast; the first that breaks an invariant
// is printed with its seed and ends the run. docs/membership.md names the invariants.
//
//   check_views [--schedules N] [--seed S] [--processes N] [--trace] [--bug majority|answers|commit]
//
// `--schedules 1 --seed S --trace` shows one schedule. With `--bug`, in the program that was compiled for it, the run
// succeeds if the mistake is found.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "views_world.hpp"

using namespace storm;

namespace {

constexpr Nanos silence = World::silence;
bool tracing = false;

struct Options {
    std::uint64_t schedules = 100'000, seed = 1;
    std::uint16_t processes = 0;  // 0: from 2 to 7
};

struct Totals {
    std::uint64_t notes{}, views{}, steps{}, healed{}, excused{};
    Nanos slowest{};
};

template <class... Words>
void say(const World& world, const char* format, Words... words) {
    if (!tracing) return;
    std::printf("%8.3f  ", static_cast<double>(world.now()) / 1e9);
    std::printf(format, words...);
    std::printf("\n");
}

void show(const View& view) {
    std::printf(" %u:", view.number);
    for (const Member who : view.members)
        std::printf(" %u.%u%s", who.rank, who.incarnation, view.has_joined(who) ? "+" : "");
    for (const Member who : view.leaving) std::printf(" (%u.%u)", who.rank, who.incarnation);
    for (const Start& start : view.starts)
        std::printf(" from %llu/%u", static_cast<unsigned long long>(start.steps), start.base);
}

void trace_note(const World& world, std::uint16_t from, const OutgoingViewMessage& sent) {
    static constexpr const char* names[] = {"",         "beat",    "prepare", "promise", "value", "propose",
                                            "accepted", "refusal", "record",  "request", "card"};
    const auto note = parse_view_message(sent.body, world.capacity());
    if (!note || note->kind == ViewMessageKind::beat) return;
    std::printf("%8.3f    %u -> %u %s in %u", static_cast<double>(world.now()) / 1e9, from, sent.to,
                names[static_cast<std::size_t>(note->kind)], note->number);
    if (note->ballot) std::printf(", ballot %u.%u", note->ballot.round, note->ballot.rank);
    if (note->accepted) std::printf(", accepted %u.%u", note->accepted.round, note->accepted.rank);
    if (note->view.number != 0) show(note->view);
    std::printf("\n");
}

class Schedule {
public:
    Schedule(std::uint64_t seed, std::uint16_t processes)
        : size_(processes != 0 ? processes : static_cast<std::uint16_t>(2 + seed % 6)),
          world_(size_, static_cast<std::uint16_t>(size_ + 2), seed),
          dice_(seed ^ 0x5eed'0f'5eedULL) {
        if (tracing) world_.trace = trace_note;
        // A process that is restarted has forgotten what it answered. Views survive that of a quorum only where nobody
        // else came in meanwhile: docs/membership.md, "Limits". So a schedule has either.
        restarts_ = dice_.chance(50);
        heals_ = dice_.chance(10);
    }

    // True if every invariant held.
    bool run(Totals& totals) {
        change_network();
        const std::uint64_t events = 20 + dice_.below(60);
        for (std::uint64_t i = 0; i < events && good(); ++i) happen();
        if (good() && heals_) finish(totals);
        totals.notes += world_.notes();
        totals.views += world_.decided().size() - 1;
        for (std::uint16_t rank = 0; rank < world_.capacity(); ++rank) totals.steps += world_.at(rank).steps;
        return good();
    }
    [[nodiscard]] std::string violation() const { return world_.violation().empty() ? stuck_ : world_.violation(); }

private:
    [[nodiscard]] bool good() const { return world_.violation().empty() && stuck_.empty(); }
    std::uint16_t any() { return static_cast<std::uint16_t>(dice_.below(world_.capacity())); }
    [[nodiscard]] bool lives(std::uint16_t rank) { return world_.at(rank).views != nullptr; }

    void change_network() {
        world_.network.loss_percent = dice_.chance(50) ? 0 : static_cast<unsigned>(dice_.below(50));
        world_.network.twice_percent = dice_.chance(70) ? 0 : 20;
        world_.network.jitter =
            dice_.chance(50) ? 0 : static_cast<Nanos>(dice_.below(3)) * silence / 20 + 50 * millisecond;
    }

    void work() {
        for (std::uint16_t rank = 0; rank < world_.capacity(); ++rank) {
            if (dice_.chance(70)) (void)world_.act(rank);
        }
    }

    void happen() {
        const std::uint64_t what = dice_.below(100);
        const std::uint16_t rank = any(), other = any();
        if (what < 8) {
            disturb();
        } else if (what < 45) {
            static constexpr Nanos spans[] = {8 * millisecond, 30 * millisecond, silence / 50, silence / 10,
                                              silence / 4};
            const Nanos span = spans[dice_.below(std::size(spans))];
            world_.run_for(static_cast<Nanos>(dice_.below(static_cast<std::uint64_t>(span))));
        } else if (what < 65) {
            work();
        } else if (what < 72) {
            if (rank == other) return;
            if (heals_) {
                say(world_, "the link from %u to %u dies", rank, other);
                world_.cut(rank, other);
                if (dice_.chance(20)) refuse(rank, other);
            } else if (world_.at(rank).runs()) {
                if (dice_.chance(30)) return refuse(rank, other);
                // A quick way to bad links.
                say(world_, "the path from %u to %u is blocked", rank, other);
                world_.at(rank).views->blocked(other, world_.now());
            }
        } else if (what < 75) {
            Ranks side;
            for (std::uint16_t each = 0; each < world_.capacity(); ++each) side.set(each, dice_.chance(50));
            say(world_, "the network parts");
            if (tracing) {
                for (const std::uint16_t each : side) std::printf("            %u on one side\n", each);
            }
            world_.part(side);
        } else if (what < 79) {
            say(world_, "all links heal");
            world_.heal();
        } else if (what < 81) {
            change_network();
        } else if (what < 84) {
            if (!lives(rank)) return;
            say(world_, "%u dies", rank);
            world_.kill(rank);
            if (dice_.chance(50)) refuse(other, rank);
        } else if (what < 86) {
            if (!lives(rank)) return;
            say(world_, "%u says goodbye", rank);
            world_.close(rank);
        } else if (what < 89) {
            say(world_, "%u is paused", rank);
            world_.pause(rank);
        } else if (what < 91) {
            say(world_, "%u runs on", rank);
            world_.resume(rank);
        } else if (what < 92) {
            if (!lives(rank)) return;
            say(world_, "%u wants a view anew", rank);
            world_.anew(rank);
        } else if (what < 97) {
            come(rank, other);
        } else if (what < 99 || !heals_) {
            if (!lives(rank)) return;
            say(world_, "%u wants out", rank);
            world_.leave(rank);
        } else {
            world_.run_for(silence);
        }
    }

    // A kernel says that nobody is there; it may be wrong.
    void refuse(std::uint16_t rank, std::uint16_t other) {
        if (!world_.at(rank).runs()) return;
        say(world_, "%u hears that nobody is at %u", rank, other);
        world_.at(rank).views->refused(other, world_.now());
    }

    // Strikes whoever proposes just now, or lets it go on after others have taken over: ballots meet that way.
    void disturb() {
        for (std::uint16_t rank = 0; rank < world_.capacity(); ++rank) {
            if (!lives(rank) || !world_.at(rank).views->proposing()) continue;
            if (world_.at(rank).paused) {
                if (!dice_.chance(30)) continue;
                say(world_, "%u runs on", rank);
                world_.resume(rank);
            } else if (dice_.chance(50)) {
                say(world_, "%u, who proposes, is paused", rank);
                world_.pause(rank);
                world_.run_for(silence / 4);
            } else {
                const std::uint16_t other = any();
                say(world_, "%u, who proposes, no longer reaches %u", rank, other);
                if (rank != other) world_.cut(rank, other);
            }
        }
    }

    void come(std::uint16_t rank, std::uint16_t sponsor) {
        if (lives(rank) || rank == sponsor || !world_.at(sponsor).runs()) return;
        if ((rank < size_) != restarts_) return;
        say(world_, "%u begins, and asks %u", rank, sponsor);
        world_.join(rank, sponsor);
    }

    // Whether those who live must come to an agreement that contains them all.
    [[nodiscard]] bool must_agree() {
        View top;
        for (std::uint16_t rank = 0; rank < world_.capacity(); ++rank) {
            if (lives(rank) && world_.at(rank).views->latest().number > top.number)
                top = world_.at(rank).views->latest();
        }
        if (top.number == 0) return false;
        for (auto next = world_.decided().find(top.number); next != world_.decided().end(); ++next) {
            Ranks here;
            bool stays = false;
            for (const Member who : next->second.members) {
                const bool there = lives(who.rank) && world_.at(who.rank).self == who;
                here.set(who.rank, there);
                // Somebody must be there who holds something.
                stays =
                    stays || (there && !world_.at(who.rank).asked_out && world_.at(who.rank).views->latest().has(who) &&
                              !world_.at(who.rank).views->blank(World::session));
            }
            if (!stays || !is_quorum(next->second, here)) return false;
        }
        return true;
    }

    // Heals everything. A majority that can talk must then agree on all who live, and go on working.
    void finish(Totals& totals) {
        say(world_, "everything heals");
        world_.heal();
        world_.network = {};
        for (std::uint16_t rank = 0; rank < world_.capacity(); ++rank) {
            world_.resume(rank);
            if (lives(rank) && world_.at(rank).asked_out) world_.close(rank);
        }
        if (!must_agree()) {
            ++totals.excused;
            return;
        }
        const Nanos began = world_.now();
        while (good() && !agreed()) {
            if (world_.now() > began + 12 * silence) {
                // What the dead had accepted may be decided only now, and may need one of them.
                if (!must_agree()) {
                    ++totals.excused;
                    return;
                }
                stuck_ = "no agreement after everything healed";
                if (tracing) report();
                return;
            }
            for (std::uint16_t rank = 0; rank < world_.capacity(); ++rank) {
                // As a process does that nobody has let in for a while.
                if (lives(rank) && world_.view(rank).number == 0) world_.ask(rank, member());
            }
            world_.run_for(silence / 10);
            work();
        }
        totals.slowest = std::max(totals.slowest, world_.now() - began);
        ++totals.healed;
        const std::uint16_t witness = member();
        const std::uint64_t before = world_.at(witness).steps;
        for (int i = 0; i < 60 && good() && world_.at(witness).steps < before + 2; ++i) {
            for (int turn = 0; turn < 10; ++turn) work();
            // Somebody who was leaving may have to be given up first.
            if (i % 2 == 1) world_.run_for(silence / 10);
        }
        if (good() && world_.at(witness).steps < before + 2 && must_agree()) {
            stuck_ = "no step after everybody agreed";
            if (tracing) report();
        }
    }

    [[nodiscard]] std::uint16_t member() {
        for (std::uint16_t rank = 0; rank < world_.capacity(); ++rank) {
            if (lives(rank) && world_.at(rank).views->inside()) return rank;
        }
        return 0;
    }

    [[nodiscard]] bool agreed() {
        std::optional<View> first;
        Ranks all;
        for (std::uint16_t rank = 0; rank < world_.capacity(); ++rank) {
            if (!lives(rank)) continue;
            all.add(rank);
            if (!first) first = world_.view(rank);
            if (!world_.at(rank).views->inside() || world_.at(rank).views->frozen()) return false;
            if (world_.view(rank).number != first->number) return false;
        }
        return first && first->ranks() == all;
    }

    void report() {
        for (std::uint16_t rank = 0; rank < world_.capacity(); ++rank) {
            if (!lives(rank)) continue;
            const Views& views = *world_.at(rank).views;
            const auto connectivity = views.connectivity(world_.now());
            std::printf("          %u.%u:%s%s%s%s, %llu steps, in", rank, world_.at(rank).self.incarnation,
                        views.inside() ? " inside" : " outside", views.frozen() ? " frozen" : "",
                        connectivity.quorum ? " quorum" : "", connectivity.requesting_join ? " knocks" : "",
                        static_cast<unsigned long long>(world_.at(rank).steps));
            show(world_.view(rank));
            std::printf("\n");
        }
    }

    std::uint16_t size_;
    World world_;
    Dice dice_;
    bool restarts_{}, heals_{};
    std::string stuck_;
};

[[nodiscard]] std::uint64_t number_after(int argc, char** argv, int& at) {
    if (++at >= argc) {
        std::fprintf(stderr, "check_views: a number must follow %s\n", argv[at - 1]);
        std::exit(2);
    }
    return std::strtoull(argv[at], nullptr, 10);
}

[[nodiscard]] bool plant([[maybe_unused]] std::string_view name) {
#ifdef STORM_VIEWS_BUG
    views_bug = name == "majority"  ? ViewsBug::majority
                : name == "answers" ? ViewsBug::answers
                : name == "commit"  ? ViewsBug::commit
                                    : ViewsBug::none;
#endif
    return views_bug != ViewsBug::none;
}

}  // namespace

int main(int argc, char** argv) {
    Options options;
    const char* bug = nullptr;
    for (int at = 1; at < argc; ++at) {
        const std::string_view word = argv[at];
        if (word == "--schedules") {
            options.schedules = number_after(argc, argv, at);
        } else if (word == "--seed") {
            options.seed = number_after(argc, argv, at);
        } else if (word == "--processes") {
            options.processes = static_cast<std::uint16_t>(std::min<std::uint64_t>(number_after(argc, argv, at), 200));
        } else if (word == "--trace") {
            tracing = true;
        } else if (word == "--bug" && at + 1 < argc && plant(argv[at + 1])) {
            bug = argv[++at];
        } else {
            std::fprintf(stderr, "check_views: %s is not understood here; see the head of check_views.cpp\n", argv[at]);
            return 2;
        }
    }
    const auto began = std::chrono::steady_clock::now();
    const auto seconds = [&] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
    };
    Totals totals;
    for (std::uint64_t i = 0; i < options.schedules; ++i) {
        const std::uint64_t seed = options.seed + i;
        Schedule schedule(seed, options.processes);
        if (schedule.run(totals)) continue;
        if (bug != nullptr) {
            std::printf("bug '%s' found after %llu schedules, %.2f s: %s\n", bug,
                        static_cast<unsigned long long>(i + 1), seconds(), schedule.violation().c_str());
            return 0;
        }
        std::printf("seed %llu: %s\n", static_cast<unsigned long long>(seed), schedule.violation().c_str());
        if (!tracing) {
            tracing = true;
            Totals again;
            (void)Schedule(seed, options.processes).run(again);
        }
        return 1;
    }
    const double took = seconds();
    std::printf(
        "%llu schedules from seed %llu in %.1f s (%.0f a second): %llu views, %llu notes, %llu steps; %llu healed, "
        "the slowest in %.1f silences (%llu without a quorum)\n",
        static_cast<unsigned long long>(options.schedules), static_cast<unsigned long long>(options.seed), took,
        static_cast<double>(options.schedules) / took, static_cast<unsigned long long>(totals.views),
        static_cast<unsigned long long>(totals.notes), static_cast<unsigned long long>(totals.steps),
        static_cast<unsigned long long>(totals.healed),
        static_cast<double>(totals.slowest) / static_cast<double>(silence),
        static_cast<unsigned long long>(totals.excused));
    if (bug == nullptr) return 0;
    std::printf("bug '%s' was not found\n", bug);
    return 1;
}
