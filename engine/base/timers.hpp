// Timers of numbered owners, with the earliest found in constant time: a tournament tree. The leaves of a binary tree
// hold the entries, and each inner node holds the earlier of its two children.
//
// An entry may be early but is never late. A caller that makes a timer earlier must call `set` or `set_earlier`. A
// timer that only moves later, as most do with every datagram, needs no call: `next` and `take_due` look up the true
// time of an entry when it falls due, and correct it. So an arriving datagram costs nothing here, and the answer is
// still exact.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/clock.hpp"

namespace storm {

class Timers {
public:
    using Owner = std::uint32_t;

    explicit Timers(std::size_t owners = 0) { resize(owners); }

    // Owners are numbered below `owners`. Entries are kept; new ones are `never`.
    void resize(std::size_t owners);
    [[nodiscard]] std::size_t size() const { return owners_; }
    [[nodiscard]] Nanos at(Owner owner) const { return nodes_[leaves() + owner]; }
    // The earliest entry, which may be early; `never` if there is none.
    [[nodiscard]] Nanos earliest() const { return owners_ == 0 ? never : nodes_[1]; }
    // The lowest owner with that entry.
    [[nodiscard]] Owner first() const;

    void set(Owner owner, Nanos at);
    void set_earlier(Owner owner, Nanos at) {
        if (at < this->at(owner)) set(owner, at);
    }
    // Sets all entries to `true_time(owner)`. This is faster than setting them one by one.
    template <class TrueTime>
    void set_all(TrueTime&& true_time);

    // When the earliest timer is due. `true_time(owner)` is never before the owner's entry.
    template <class TrueTime>
    [[nodiscard]] Nanos next(TrueTime&& true_time);
    // The owners whose timers are due, in rising order. Their entries become `never`; the caller must set them again.
    template <class TrueTime>
    [[nodiscard]] std::vector<Owner> take_due(Nanos now, TrueTime&& true_time);

private:
    [[nodiscard]] std::size_t leaves() const { return nodes_.size() / 2; }
    void rebuild();  // computes all nodes from the leaves

    std::size_t owners_{};
    std::vector<Nanos> nodes_;  // node k has the children 2k and 2k + 1; the leaves come last
};

inline void Timers::resize(std::size_t owners) {
    if (owners <= owners_) return;
    const std::size_t wanted = std::bit_ceil(owners);
    if (nodes_.empty()) {
        nodes_.assign(2 * wanted, never);
    } else if (wanted > leaves()) {
        std::vector<Nanos> larger(2 * wanted, never);
        std::copy_n(nodes_.begin() + static_cast<std::ptrdiff_t>(leaves()), owners_,
                    larger.begin() + static_cast<std::ptrdiff_t>(wanted));
        nodes_ = std::move(larger);
        rebuild();
    }
    owners_ = owners;
}

inline void Timers::rebuild() {
    for (std::size_t node = leaves(); node-- > 1;) nodes_[node] = std::min(nodes_[2 * node], nodes_[2 * node + 1]);
}

inline void Timers::set(Owner owner, Nanos at) {
    std::size_t node = leaves() + owner;
    nodes_[node] = at;
    while (node > 1) {
        node /= 2;
        const Nanos earlier = std::min(nodes_[2 * node], nodes_[2 * node + 1]);
        if (nodes_[node] == earlier) return;
        nodes_[node] = earlier;
    }
}

inline Timers::Owner Timers::first() const {
    std::size_t node = 1;
    while (node < leaves()) node = nodes_[2 * node] == nodes_[node] ? 2 * node : 2 * node + 1;
    return static_cast<Owner>(node - leaves());
}

template <class TrueTime>
void Timers::set_all(TrueTime&& true_time) {
    for (Owner owner = 0; owner < owners_; ++owner) nodes_[leaves() + owner] = true_time(owner);
    rebuild();
}

template <class TrueTime>
Nanos Timers::next(TrueTime&& true_time) {
    while (earliest() != never) {
        const Owner owner = first();
        const Nanos at = true_time(owner);
        if (at == earliest()) break;
        set(owner, at);
    }
    return earliest();
}

template <class TrueTime>
std::vector<Timers::Owner> Timers::take_due(Nanos now, TrueTime&& true_time) {
    std::vector<Owner> due;
    while (earliest() <= now && earliest() != never) {
        const Owner owner = first();
        const Nanos at = true_time(owner);
        if (at <= now) due.push_back(owner);
        set(owner, at <= now ? never : at);
    }
    std::sort(due.begin(), due.end());
    return due;
}

}  // namespace storm
