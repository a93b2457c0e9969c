// Python's view of membership: the same methods for an endpoint and, with a rank before all arguments, for a
// simulation.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "views/views.hpp"

namespace storm::python {

namespace nb = nanobind;

using PyMembers = std::vector<std::pair<std::uint16_t, std::uint32_t>>;
using PyMembershipStatus = nb::typed<nb::dict, nb::str, nb::any>;

inline PyMembers to_pairs(const std::vector<Member>& members) {
    PyMembers all;
    for (const Member& each : members) all.emplace_back(each.rank, each.incarnation);
    return all;
}

inline void define_view(nb::module_& m) {
    nb::class_<View>(m, "View")
        .def_ro("number", &View::number)
        .def_prop_ro("members", [](const View& v) { return to_pairs(v.members); })
        .def_prop_ro("joined", [](const View& v) { return to_pairs(v.joined); })
        .def_prop_ro("blank",
                     [](const View& v) {
                         std::vector<std::uint16_t> all;
                         for (const std::uint16_t rank : v.blank) all.push_back(rank);
                         return all;
                     })
        .def_prop_ro("leaving", [](const View& v) { return to_pairs(v.leaving); })
        .def_prop_ro("starts", [](const View& v) {
            std::vector<std::tuple<std::uint32_t, std::uint64_t, std::uint32_t>> all;
            for (const Start& each : v.starts) all.emplace_back(each.session, each.steps, each.base);
            return all;
        });
}

inline PyMembershipStatus to_dict(const Views::MembershipStatus& connectivity, Nanos now) {
    nb::dict heard, reachable, all;
    for (std::size_t rank = 0; rank < connectivity.last_received_at.size(); ++rank) {
        if (const auto at = connectivity.last_received_at[rank])
            heard[nb::int_(rank)] = static_cast<double>(now - *at) * 1e-9;
    }
    for (std::size_t rank = 0; rank < connectivity.reachable.size(); ++rank) {
        if (!connectivity.reachable[rank].empty()) reachable[nb::int_(rank)] = nb::cast(connectivity.reachable[rank]);
    }
    all["heard_s"] = heard;
    all["hears"] = reachable;
    all["quorum"] = connectivity.quorum;
    all["proposing"] = connectivity.proposing;
    all["knocking"] = connectivity.requesting_join;
    return all;
}

// `reach(self, where..., work)` calls `work(views, now)` on the views of that endpoint. `where`: the names of the
// arguments before a method's own. `advance`: the Python name of Views::advance, as a simulation's `advance` is about
// time.
template <class... Where, class Class, class Reach, class... Names>
void define_views(Class& type, const char* advance, Reach reach, const Names&... where) {
    using Self = typename Class::Type;
    type.def(
        "watch", [reach](Self& self, Where... at) { reach(self, at..., [](Views& v, Nanos now) { v.watch(now); }); },
        where...);
    type.def(
        "view",
        [reach](Self& self, Where... at) {
            return reach(self, at..., [](Views& v, Nanos) {
                const View* view = v.view();
                return view == nullptr ? std::nullopt : std::optional<View>(*view);
            });
        },
        where...);
    type.def(
        "inside",
        [reach](Self& self, Where... at) { return reach(self, at..., [](Views& v, Nanos) { return v.inside(); }); },
        where...);
    type.def(
        "frozen",
        [reach](Self& self, Where... at) { return reach(self, at..., [](Views& v, Nanos) { return v.frozen(); }); },
        where...);
    type.def(
        "add_session",
        [reach](Self& self, Where... at, std::uint32_t session, std::uint64_t steps, std::uint32_t settled) {
            reach(self, at..., [&](Views& v, Nanos) {
                try {
                    v.add_session({session, steps, settled});
                } catch (const std::length_error& error) {
                    throw std::invalid_argument(error.what());  // misuse, which leaves the engine as it was
                }
            });
        },
        where..., nb::arg("session"), nb::arg("steps"), nb::arg("settled"));
    type.def(
        advance,
        [reach](Self& self, Where... at, std::uint32_t session, std::uint64_t steps, std::uint32_t settled,
                std::uint32_t view) {
            return reach(self, at..., [&](Views& v, Nanos) {
                const View* latest = v.view();
                return latest != nullptr && latest->number == view && v.advance({session, steps, settled});
            });
        },
        where..., nb::arg("session"), nb::arg("steps"), nb::arg("settled"), nb::arg("view"));
    type.def(
        "blank",
        [reach](Self& self, Where... at, std::uint32_t session) {
            return reach(self, at..., [&](Views& v, Nanos) { return v.blank(session); });
        },
        where..., nb::arg("session"));
    type.def(
        "remove_session",
        [reach](Self& self, Where... at, std::uint32_t session) {
            reach(self, at..., [&](Views& v, Nanos) { v.remove_session(session); });
        },
        where..., nb::arg("session"));
    type.def(
        "request_admission",
        [reach](Self& self, Where... at, std::uint16_t peer, std::uint32_t incarnation, const nb::bytes& card) {
            const auto* first = static_cast<const std::byte*>(card.data());
            const std::vector<std::byte> copy(first, first + card.size());
            reach(self, at..., [&](Views& v, Nanos now) { v.request_admission({peer, incarnation}, copy, now); });
        },
        where..., nb::arg("peer"), nb::arg("incarnation"), nb::arg("card"));
    type.def(
        "request_leave",
        [reach](Self& self, Where... at) { reach(self, at..., [](Views& v, Nanos now) { v.request_leave(now); }); },
        where...);
    type.def(
        "request_view",
        [reach](Self& self, Where... at) { reach(self, at..., [](Views& v, Nanos now) { v.request_view(now); }); },
        where...);
    type.def(
        "card",
        [reach](Self& self, Where... at, std::uint16_t peer,
                std::optional<std::uint32_t> incarnation) -> std::optional<nb::bytes> {
            const auto found = reach(self, at..., [&](Views& v, Nanos) -> std::optional<std::vector<std::byte>> {
                const Member* present = v.view() == nullptr ? nullptr : v.view()->at(peer);
                if (!incarnation && present == nullptr) return std::nullopt;
                const auto card = v.card(incarnation ? Member{peer, *incarnation} : *present);
                return card ? std::optional(std::vector<std::byte>(card->begin(), card->end())) : std::nullopt;
            });
            return found ? std::optional(nb::bytes(found->data(), found->size())) : std::nullopt;
        },
        where..., nb::arg("peer"), nb::arg("incarnation").none() = nb::none());
    type.def(
        "join_requests",
        [reach](Self& self, Where... at) {
            return reach(self, at..., [](Views& v, Nanos) { return to_pairs(v.join_requests()); });
        },
        where...);
    type.def(
        "connectivity",
        [reach](Self& self, Where... at) {
            const auto [connectivity, as_of] =
                reach(self, at..., [](Views& v, Nanos now) { return std::pair(v.connectivity(now), now); });
            return to_dict(connectivity, as_of);
        },
        where...);
}

}  // namespace storm::python
