// The Python module stormtorch_lab._engine: a web service whose packets share a simulation's links.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "traffic/shared_network.hpp"

namespace nb = nanobind;
using namespace storm;

namespace {

using Mapping = nb::typed<nb::dict, nb::str, nb::any>;

Nanos to_nanos(double seconds) { return std::llround(seconds * 1e9); }

SharedNetworkSettings to_shared_network_settings(const nb::dict& from, Nanos delay) {
    SimLinkSettings down{.bytes_per_s = nb::cast<double>(from["bytes_per_s"]),
                         .queue_bytes = nb::cast<std::size_t>(from["queue_bytes"]),
                         .low_queue_bytes = nb::cast<std::size_t>(from["low_queue_bytes"]),
                         .low_share = nb::cast<double>(from["low_share"]),
                         .burst_bytes = nb::cast<double>(from["burst_bytes"])};
    SimLinkSettings up = down;
    up.queue_bytes = nb::cast<std::size_t>(from["up_queue_bytes"]);
    SimLinkSettings trunk = down;
    trunk.bytes_per_s = nb::cast<double>(from["trunk_bytes_per_s"]);
    trunk.queue_bytes = trunk.low_queue_bytes = nb::cast<std::size_t>(from["trunk_queue_bytes"]);
    const auto hosts_per_rack = nb::cast<std::size_t>(from["hosts_per_rack"]);
    return {.network = {.up = up, .down = down, .delay = delay, .hosts_per_rack = hosts_per_rack, .trunk = trunk},
            .priority = nb::cast<bool>(from["low"]) ? Priority::low : Priority::normal};
}

nb::dict to_dict(const SimLink::Counts& counts) {
    nb::dict all;
    all["packets"] = counts.packets;
    all["bytes"] = counts.bytes;
    all["drops"] = counts.drops;
    return all;
}

}  // namespace

NB_MODULE(_engine, m) {
    m.doc() = "Networks that a simulation shares with other traffic.";
    nb::module_::import_("stormtorch._engine");  // has the class that the one below derives from
    nb::class_<SharedNetwork, Medium>(m, "SharedNetwork")
        .def(
            "__init__",
            [](SharedNetwork* self, std::size_t hosts, const Mapping& lines, double delay_s) {
                new (self) SharedNetwork(hosts, to_shared_network_settings(lines, to_nanos(delay_s)));
            },
            nb::arg("hosts"), nb::arg("lines"), nb::arg("delay_s"))
        .def(
            "serve",
            [](SharedNetwork& n, double requests_per_s, std::uint32_t response_bytes, std::uint32_t request_bytes,
               std::uint64_t seed, double now_s) {
                n.serve({.requests_per_s = requests_per_s,
                         .response_bytes = response_bytes,
                         .request_bytes = request_bytes,
                         .seed = seed},
                        to_nanos(now_s));
            },
            nb::arg("requests_per_s"), nb::arg("response_bytes"), nb::arg("request_bytes"), nb::arg("seed"),
            nb::arg("now_s"))
        .def("stop_service", [](SharedNetwork& n) { n.service().stop(); })
        // When each request arrived and how long its response took, in seconds, in the order of the responses.
        .def("answered",
             [](SharedNetwork& n) {
                 std::vector<std::pair<double, double>> all;
                 for (const SimService::Answered& each : n.service().answered()) {
                     all.emplace_back(static_cast<double>(each.requested_at) * 1e-9,
                                      static_cast<double>(each.took) * 1e-9);
                 }
                 return all;
             })
        .def("service_counts",
             [](SharedNetwork& n) -> Mapping {
                 nb::dict all;
                 all["asked"] = n.service().requested();
                 all["answered"] = n.service().answered().size();
                 all["connections"] = n.service().connections();
                 all["resent"] = n.service().resent();
                 all["timeouts"] = n.service().timeouts();
                 return all;
             })
        .def("set_trunk", &SharedNetwork::set_trunk, nb::arg("rack"), nb::arg("bytes_per_s"))
        .def("trunk_drops", [](const SharedNetwork& n) { return n.lines().trunk_drops(); })
        // By host, up and down, and by class.
        .def(
            "access_link_counts",
            [](const SharedNetwork& n, std::uint16_t host) -> Mapping {
                nb::dict all;
                all["up"] = to_dict(n.lines().up(host).counts(Priority::normal));
                all["up_low"] = to_dict(n.lines().up(host).counts(Priority::low));
                all["down"] = to_dict(n.lines().down(host).counts(Priority::normal));
                all["down_low"] = to_dict(n.lines().down(host).counts(Priority::low));
                return all;
            },
            nb::arg("host"));
}
