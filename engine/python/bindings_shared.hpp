// Python's view of a simulation's shared lines and of the service on them.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "sim/sim.hpp"

namespace storm::python {

namespace nb = nanobind;

using SharedMapping = nb::typed<nb::dict, nb::str, nb::any>;

inline SharedLines to_shared_lines(const nb::dict& from, Nanos delay) {
    LineSettings down{.bytes_per_s = nb::cast<double>(from["bytes_per_s"]),
                      .queue_bytes = nb::cast<std::size_t>(from["queue_bytes"]),
                      .low_queue_bytes = nb::cast<std::size_t>(from["low_queue_bytes"]),
                      .low_share = nb::cast<double>(from["low_share"]),
                      .burst_bytes = nb::cast<double>(from["burst_bytes"])};
    LineSettings up = down;
    up.queue_bytes = nb::cast<std::size_t>(from["up_queue_bytes"]);
    LineSettings trunk = down;
    trunk.bytes_per_s = nb::cast<double>(from["trunk_bytes_per_s"]);
    trunk.queue_bytes = trunk.low_queue_bytes = nb::cast<std::size_t>(from["trunk_queue_bytes"]);
    const auto hosts_per_rack = nb::cast<std::size_t>(from["hosts_per_rack"]);
    return {.network = {.up = up, .down = down, .delay = delay, .hosts_per_rack = hosts_per_rack, .trunk = trunk},
            .priority = nb::cast<bool>(from["low"]) ? Priority::low : Priority::normal};
}

inline nb::dict to_dict(const SimLine::Counts& counts) {
    nb::dict all;
    all["packets"] = counts.packets;
    all["bytes"] = counts.bytes;
    all["drops"] = counts.drops;
    return all;
}

template <class Class>
void define_shared(Class& type) {
    type.def(
        "run_until",
        [](Sim& s, double at_s) {
            if (!(at_s >= 0 && at_s < 1e9)) throw std::invalid_argument("at_s must be a time");
            const nb::gil_scoped_release released;
            s.run_until(std::llround(at_s * 1e9));
        },
        nb::arg("at_s"));
    type.def(
        "serve",
        [](Sim& s, double requests_per_s, std::uint32_t response_bytes, std::uint32_t request_bytes,
           std::uint64_t seed) {
            s.serve({.requests_per_s = requests_per_s,
                     .response_bytes = response_bytes,
                     .request_bytes = request_bytes,
                     .seed = seed});
        },
        nb::arg("requests_per_s"), nb::arg("response_bytes"), nb::arg("request_bytes"), nb::arg("seed"));
    type.def("stop_service", [](Sim& s) { s.service().stop(); });
    // When each request arrived and how long its answer took, in seconds, in the order of the answers.
    type.def("answered", [](Sim& s) {
        std::vector<std::pair<double, double>> all;
        for (const SimService::Answered& each : s.service().answered()) {
            all.emplace_back(static_cast<double>(each.asked_at) * 1e-9, static_cast<double>(each.took) * 1e-9);
        }
        return all;
    });
    type.def("service_counts", [](Sim& s) -> SharedMapping {
        nb::dict all;
        all["asked"] = s.service().asked();
        all["answered"] = s.service().answered().size();
        all["connections"] = s.service().connections();
        all["resent"] = s.service().resent();
        all["timeouts"] = s.service().timeouts();
        return all;
    });
    type.def("set_trunk", &Sim::set_trunk, nb::arg("rack"), nb::arg("bytes_per_s"));
    type.def("trunk_drops", [](const Sim& s) { return s.shared().trunk_drops(); });
    // By host, up and down, and by class.
    type.def(
        "line_counts",
        [](const Sim& s, std::uint16_t host) -> SharedMapping {
            nb::dict all;
            all["up"] = to_dict(s.shared().up(host).counts(Priority::normal));
            all["up_low"] = to_dict(s.shared().up(host).counts(Priority::low));
            all["down"] = to_dict(s.shared().down(host).counts(Priority::normal));
            all["down_low"] = to_dict(s.shared().down(host).counts(Priority::low));
            return all;
        },
        nb::arg("host"));
}

}  // namespace storm::python
