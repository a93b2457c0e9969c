// The Python module stormtorch._engine: types and conversions, no logic. Tensors are passed as addresses; the caller
// keeps them alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>

#include "coding/coding_model.hpp"
#include "io/endpoint.hpp"
#include "math/grid.hpp"
#include "python/bindings_views.hpp"
#include "sim/sim.hpp"
#include "wire/seal.hpp"

namespace nb = nanobind;
using namespace storm;

namespace {

// Settings and counters as Python dictionaries, by name.
using Mapping = nb::typed<nb::dict, nb::str, nb::any>;

Nanos to_nanos(std::optional<double> seconds) {
    if (!seconds || *seconds > 1e9) return never;
    if (std::isnan(*seconds)) throw std::invalid_argument("nan is not a time");
    return static_cast<Nanos>(std::max(*seconds, 0.0) * 1e9);
}

// Python passes enums as numbers.
template <class Enum>
Enum to_enum(const char* name, int value, Enum last) {
    if (value < 0 || value > static_cast<int>(last)) {
        throw std::invalid_argument(std::string(name) + " must lie in [0, " + std::to_string(static_cast<int>(last)) +
                                    "], got " + std::to_string(value));
    }
    return static_cast<Enum>(value);
}

using PySend = std::tuple<std::uint16_t, std::uintptr_t, std::uint64_t, bool>;
using PyReceive = std::tuple<std::uint16_t, std::uintptr_t, std::uint64_t, bool, bool>;
using PyReduction = std::tuple<int, int, int, std::uintptr_t, std::uintptr_t, std::uint64_t, std::uint32_t, bool,
                               std::uint64_t, std::uint64_t>;

ExchangeSpec make_spec(std::uint32_t channel, std::uint32_t seq, const std::vector<PySend>& sends,
                       const std::vector<PyReceive>& receives, const std::optional<PyReduction>& reduction,
                       std::pair<double, double> budgets,
                       std::pair<std::optional<double>, std::optional<double>> deadlines_s,
                       std::optional<double> timeout_s, std::uint32_t view,
                       std::pair<std::optional<double>, std::optional<double>> redundancies) {
    ExchangeSpec spec;
    spec.view = view;
    spec.channel = channel;
    spec.seq = seq;
    for (const auto& [peer, data, bytes, second_stage] : sends) {
        spec.sends.push_back({.peer = peer,
                              .second_stage = second_stage,
                              .data = reinterpret_cast<const std::byte*>(data),
                              .bytes = bytes});
    }
    for (const auto& [peer, into, bytes, second_stage, reduce] : receives) {
        spec.receives.push_back({.peer = peer,
                                 .second_stage = second_stage,
                                 .reduce = reduce,
                                 .into = reinterpret_cast<std::byte*>(into),
                                 .bytes = bytes});
    }
    if (reduction) {
        const auto& [mode, wire, out_dtype, own, out, bytes, own_position, average, seed, elements] = *reduction;
        spec.reduction = ReductionSpec{.mode = to_enum("mode", mode, Reduce::copy),
                                       .wire = to_enum("wire", wire, Dtype::int4),
                                       .out_dtype = to_enum("out_dtype", out_dtype, Dtype::int4),
                                       .own = reinterpret_cast<const std::byte*>(own),
                                       .out = reinterpret_cast<std::byte*>(out),
                                       .bytes = bytes,
                                       .own_position = own_position,
                                       .average = average,
                                       .seed = seed,
                                       .elements = elements};
    }
    spec.stages[0] = {.budget = budgets.first,
                      .deadline = to_nanos(deadlines_s.first),
                      .redundancy = redundancies.first.value_or(StageSpec::automatic)};
    spec.stages[1] = {.budget = budgets.second,
                      .deadline = to_nanos(deadlines_s.second),
                      .redundancy = redundancies.second.value_or(StageSpec::automatic)};
    spec.timeout_at = to_nanos(timeout_s);
    return spec;
}

LinkFaults to_link_faults(const nb::dict& from) {
    LinkFaults link;
    link.loss = nb::cast<double>(from["loss"]);
    link.burst = nb::cast<double>(from["burst"]);
    link.burst_time = nb::cast<Nanos>(from["burst_ns"]);
    link.shared = nb::cast<double>(from["shared"]);
    link.duplicate = nb::cast<double>(from["duplicate"]);
    link.reorder = nb::cast<double>(from["reorder"]);
    link.corrupt = nb::cast<double>(from["corrupt"]);
    link.delay = nb::cast<Nanos>(from["delay_ns"]);
    link.jitter = nb::cast<Nanos>(from["jitter_ns"]);
    const auto trace = nb::cast<nb::bytes>(from["trace"]);
    const auto* bits = static_cast<const std::uint8_t*>(trace.data());
    link.trace.assign(bits, bits + trace.size());
    return link;
}

FaultSettings to_fault_settings(const nb::dict& from) {
    FaultSettings settings;
    settings.seed = nb::cast<std::uint64_t>(from["seed"]);
    settings.default_link = to_link_faults(nb::cast<nb::dict>(from["default"]));
    for (const auto& [link, faults] : nb::cast<nb::dict>(from["links"])) {
        settings.links[nb::cast<std::pair<std::uint16_t, std::uint16_t>>(link)] =
            to_link_faults(nb::cast<nb::dict>(faults));
    }
    return settings;
}

// The sealing key, then the opening key.
LinkKeys to_link_keys(const nb::bytes& from) {
    LinkKeys keys;
    if (from.size() != sizeof keys) throw std::invalid_argument("a link has two keys of 16 bytes");
    std::memcpy(&keys, from.data(), sizeof keys);
    return keys;
}

// By rank, or by lane.
using PyAddresses = std::vector<std::pair<std::string, std::uint16_t>>;

// Nothing is sent to a vacant slot, whose host is empty.
std::vector<Address> to_addresses(const PyAddresses& from, const std::vector<std::uint16_t>& vacant) {
    std::vector<Address> all;
    for (const auto& [host, port] : from) {
        if (host.empty() && std::find(vacant.begin(), vacant.end(), all.size()) == vacant.end())
            throw std::invalid_argument("rank " + std::to_string(all.size()) + " has no address");
        all.push_back(host.empty() ? Address() : Address(host, port));
    }
    return all;
}

// `low`: of the lane of low priority, which finds its rate by itself.
CoreConfig make_core_config(std::uint16_t rank, std::size_t world, const nb::dict& from, std::size_t lane = 0,
                            bool low = false) {
    CoreConfig config;
    config.rank = rank;
    config.world = static_cast<std::uint16_t>(world);
    if (config.world != world) throw std::invalid_argument(std::to_string(world) + " ranks are more than 65535");
    config.datagram_bytes = nb::cast<std::size_t>(from["datagram_bytes"]);
    config.receive_buffer = nb::cast<std::size_t>(from["receive_buffer"]);
    config.pool_bytes = nb::cast<std::size_t>(from["pool_bytes"]);
    config.eager_bytes = nb::cast<std::size_t>(from["eager_bytes"]);
    config.rate_mode =
        to_enum("rate_mode", nb::cast<int>(from[low ? "low_rate_mode" : "rate_mode"]), RateMode::low_latency);
    if (from.contains("yield_delay_s")) config.yield_delay = to_nanos(nb::cast<double>(from["yield_delay_s"]));
    config.bytes_per_s = nb::cast<double>(from["bytes_per_s"]);
    config.silence = to_nanos(nb::cast<double>(from["silence_s"]));
    // A datagram of another lane is rejected like one of another job.
    config.secrets.cookie = nb::cast<std::uint64_t>(from["cookie"]) ^ (lane * 0x9e37'79b9'7f4a'7c15);
    config.secrets.checks_data = nb::cast<bool>(from["checks_data"]);
    config.secrets.incarnations = nb::cast<std::vector<std::uint32_t>>(from["incarnations"]);
    if (from.contains("vacant")) config.vacant = nb::cast<std::vector<std::uint16_t>>(from["vacant"]);
    if (from.contains("late")) config.late = nb::cast<bool>(from["late"]);
    // By lane, as lanes have separate packet numbers and no two datagrams of a process may have the same key and
    // number. Within a lane, by rank: both keys of the link, concatenated.
    const auto all_keys = nb::cast<std::vector<std::vector<nb::bytes>>>(from["keys"]);
    if (!all_keys.empty()) {
        const std::vector<nb::bytes>& keys = all_keys.at(lane);
        if (keys.size() != world) throw std::invalid_argument("two keys per rank are needed");
        config.secrets.sealed = true;
        // A vacant slot has no keys yet: datagrams in its name are rejected.
        for (const nb::bytes& link : keys)
            config.secrets.links.push_back(link.size() == 0 ? LinkKeys{} : to_link_keys(link));
    }
    return config;
}

template <class Struct, std::size_t n>
nb::dict to_dict(const Struct& counters, const std::array<Named<Struct>, n>& list) {
    nb::dict all;
    for (const Named<Struct>& each : list) all[each.name] = counters.*each.counter;
    return all;
}

std::tuple<double, double, double> to_tuple(const BottleneckPeaks::Peaks& peaks) {
    return {peaks.out, peaks.in, peaks.both};
}

using PyFirsts = nb::typed<nb::list, nb::typed<nb::tuple, std::uint16_t, nb::bytes>>;

PyFirsts to_list(const std::vector<Pool::First>& firsts) {
    PyFirsts all;
    for (const Pool::First& first : firsts)
        all.append(nb::make_tuple(first.source, nb::bytes(first.payload.data(), first.payload.size())));
    return all;
}

// How long to wait at a time: Python handles signals in between.
constexpr Nanos wait_slice = 200 * millisecond;

bool wait_view(Endpoint& endpoint, std::uint32_t above, std::optional<double> timeout_s) {
    const Nanos timeout = to_nanos(timeout_s);
    const Nanos timeout_at = timeout == never ? never : clock_now() + timeout;
    for (;;) {
        const Nanos left = timeout_at == never ? never : std::max<Nanos>(timeout_at - clock_now(), 0);
        bool found = false;
        {
            const nb::gil_scoped_release released;
            found = endpoint.wait_view(above, std::min(left, wait_slice));
        }
        if (found || left <= wait_slice) return found;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
    }
}

std::optional<Outcome> wait_outcome(Endpoint& endpoint, std::uint64_t id, std::optional<double> timeout_s) {
    const Nanos timeout = to_nanos(timeout_s);
    const Nanos timeout_at = timeout == never ? never : clock_now() + timeout;
    Outcome outcome;
    while (true) {
        bool ended = false;
        {
            const nb::gil_scoped_release released;
            const Nanos left = timeout_at == never ? wait_slice : std::max<Nanos>(timeout_at - clock_now(), 0);
            ended = endpoint.wait(id, std::min(left, wait_slice), outcome);
        }
        if (ended) return outcome;
        if (PyErr_CheckSignals() != 0) throw nb::python_error();
        if (clock_now() >= timeout_at) return std::nullopt;
    }
}

}  // namespace

NB_MODULE(_engine, m) {
    m.doc() = "The native engine of stormtorch.";

    nb::enum_<CanComplete>(m, "CanComplete")
        .value("GOOD", CanComplete::good)
        .value("UNCLEAR", CanComplete::unclear)
        .value("NONE", CanComplete::none);

    nb::enum_<Status>(m, "Status")
        .value("RUNNING", Status::running)
        .value("OK", Status::ok)
        .value("TIMED_OUT", Status::timed_out)
        .value("PEER_SILENT", Status::peer_silent)
        .value("PEER_LEFT", Status::peer_left)
        .value("PEER_FAILED", Status::peer_failed)
        .value("SIZE_MISMATCH", Status::size_mismatch)
        .value("CLOSED", Status::closed)
        .value("PATH_BLOCKED", Status::path_blocked)
        .value("MEMORY_BROKEN", Status::memory_broken);

    nb::class_<Arrival>(m, "Arrival")
        .def_ro("peer", &Arrival::peer)
        .def_ro("second_stage", &Arrival::second_stage)
        .def_ro("chunks", &Arrival::chunks)
        .def_ro("arrived", &Arrival::arrived)
        .def_ro("recovered", &Arrival::recovered)
        .def_ro("total_bytes", &Arrival::bytes)
        .def_ro("missing_bytes", &Arrival::missing_bytes)
        .def_prop_ro("mask", [](const Arrival& a) {
            return nb::bytes(reinterpret_cast<const char*>(a.mask.data()), a.mask.size() * 8);
        });

    nb::class_<Outcome>(m, "Outcome")
        .def_ro("status", &Outcome::status)
        .def_ro("peer", &Outcome::peer)
        .def_prop_ro("culprit", [](const Outcome& o) { return o.failure_cause.culprit; })
        .def_prop_ro("cause", [](const Outcome& o) { return o.failure_cause.cause; })
        .def_ro("missing_bytes", &Outcome::missing_bytes)
        .def_ro("expected_bytes", &Outcome::expected_bytes)
        .def_ro("announced_bytes", &Outcome::announced_bytes)
        .def_ro("repaired", &Outcome::repaired)
        .def_prop_ro("elapsed_s", [](const Outcome& o) { return static_cast<double>(o.ended - o.started) * 1e-9; })
        .def_ro("arrivals", &Outcome::arrivals)
        .def_prop_ro("counts", [](const Outcome& o) {
            return nb::bytes(reinterpret_cast<const char*>(o.counts.data()), o.counts.size() * 2);
        });

    python::define_view(m);

    nb::class_<Endpoint> endpoint(m, "Endpoint");
    endpoint
        .def(
            "__init__",
            [](Endpoint* self, const std::string& host, std::uint16_t port, std::size_t receive_buffer,
               bool low_priority, bool segmentation, bool coalescing, std::size_t lanes,
               const std::vector<std::string>& more_hosts, bool low_lane) {
                new (self) Endpoint(host, port, lanes,
                                    {.receive_buffer = receive_buffer,
                                     .low_priority = low_priority,
                                     .segmentation = segmentation,
                                     .coalescing = coalescing},
                                    more_hosts, low_lane);
            },
            nb::arg("host"), nb::arg("port"), nb::kw_only(), nb::arg("receive_buffer"), nb::arg("low_priority"),
            nb::arg("segmentation"), nb::arg("coalescing"), nb::arg("lanes") = 1,
            nb::arg("more_hosts") = std::vector<std::string>{}, nb::arg("low_lane") = false)
        .def_prop_ro("ports", &Endpoint::ports)
        .def_prop_ro("path_ports", &Endpoint::path_ports)
        .def_prop_ro("lanes", &Endpoint::lanes)
        .def_prop_ro("low", &Endpoint::low)
        .def_prop_ro("receive_buffer", &Endpoint::receive_buffer)
        .def(
            "start",
            [](Endpoint& d, std::uint16_t rank, const std::vector<PyAddresses>& peers, const Mapping& config,
               const std::vector<PyAddresses>& more) {
                std::vector<CoreConfig> configs;
                std::vector<std::vector<Address>> addresses;
                for (const PyAddresses& each : peers) {
                    const bool low = d.low() && addresses.size() + 1 == peers.size();
                    configs.push_back(make_core_config(rank, each.size(), config, addresses.size(), low));
                    addresses.push_back(to_addresses(each, configs.back().vacant));
                }
                std::vector<std::vector<Address>> further;
                for (const PyAddresses& each : more) further.push_back(to_addresses(each, {}));
                d.start(std::move(configs), std::move(addresses), further);
            },
            nb::arg("rank"), nb::arg("peers"), nb::arg("config"), nb::arg("more") = std::vector<PyAddresses>{})
        .def(
            "post",
            [](Endpoint& d, std::uint32_t channel, std::uint32_t seq, const std::vector<PySend>& sends,
               const std::vector<PyReceive>& receives, const std::optional<PyReduction>& reduction,
               std::pair<double, double> budgets, std::pair<std::optional<double>, std::optional<double>> deadlines_s,
               std::optional<double> timeout_s, std::uint32_t view,
               std::pair<std::optional<double>, std::optional<double>> redundancies, bool low) {
                ExchangeSpec spec = make_spec(channel, seq, sends, receives, reduction, budgets, deadlines_s, timeout_s,
                                              view, redundancies);
                spec.low = low;
                const nb::gil_scoped_release released;
                return d.post(std::move(spec));
            },
            nb::arg("channel"), nb::arg("seq"), nb::arg("sends"), nb::arg("receives"), nb::arg("reduction").none(),
            nb::arg("budgets"), nb::arg("deadlines_s"), nb::arg("timeout_s").none(), nb::arg("view") = 0,
            nb::arg("redundancies") = std::pair<std::optional<double>, std::optional<double>>{0.0, 0.0},
            nb::arg("low") = false)
        .def("wait", &wait_outcome, nb::arg("id"), nb::arg("timeout_s").none() = nb::none())
        .def("ended", &Endpoint::ended, nb::arg("id"))
        .def("can_complete", &Endpoint::can_complete, nb::arg("id"), nb::call_guard<nb::gil_scoped_release>())
        .def(
            "peek", [](Endpoint& d, std::uint32_t channel, std::uint32_t seq) { return to_list(d.peek(channel, seq)); },
            nb::arg("channel"), nb::arg("seq"))
        .def("cancel", &Endpoint::cancel, nb::arg("id"), nb::call_guard<nb::gil_scoped_release>())
        .def(
            "readmit",
            [](Endpoint& d, std::uint16_t peer, const PyAddresses& lanes, std::uint32_t incarnation,
               const std::vector<nb::bytes>& keys, const PyAddresses& more) {
                const std::vector<Address> addresses = to_addresses(lanes, {}), further = to_addresses(more, {});
                std::vector<LinkKeys> by_lane;
                for (const nb::bytes& link : keys) by_lane.push_back(to_link_keys(link));
                const nb::gil_scoped_release released;
                d.readmit(peer, addresses, incarnation, by_lane, further);
            },
            nb::arg("peer"), nb::arg("lanes"), nb::arg("incarnation"), nb::arg("keys"), nb::arg("more") = PyAddresses{})
        .def(
            "offer_shared_memory",
            [](Endpoint& d, std::uint16_t peer, std::size_t neighbours) {
                std::vector<int> descriptors;
                for (Driver::SharedMemoryOffer& offer : d.offer_shared_memory(peer, neighbours)) {
                    descriptors.push_back(offer.ring.release());
                    descriptors.push_back(offer.doorbell.release());
                    descriptors.push_back(offer.broadcast_buffer.release());
                }
                return descriptors;
            },
            nb::arg("peer"), nb::arg("neighbours"), nb::call_guard<nb::gil_scoped_release>())
        .def(
            "accept_shared_memory",
            [](Endpoint& d, std::uint16_t peer, const std::vector<int>& descriptors) {
                std::vector<Driver::SharedMemoryOffer> offers((descriptors.size() + 2) /
                                                              3);  // which own them, whatever happens
                for (std::size_t at = 0; at < descriptors.size(); ++at) {
                    Driver::SharedMemoryOffer& offer = offers[at / 3];
                    Descriptor* const places[] = {&offer.ring, &offer.doorbell, &offer.broadcast_buffer};
                    *places[at % 3] = Descriptor(descriptors[at]);
                }
                d.accept_shared_memory(peer, std::move(offers));
            },
            nb::arg("peer"), nb::arg("descriptors"), nb::call_guard<nb::gil_scoped_release>())
        .def(
            "offer",
            [](Endpoint& d, std::uint16_t peer, const PyAddresses& lanes) {
                const std::vector<Address> addresses = to_addresses(lanes, {});
                const nb::gil_scoped_release released;
                d.offer(peer, addresses);
            },
            nb::arg("peer"), nb::arg("lanes"))
        .def("rebind", &Endpoint::rebind, nb::arg("path"), nb::arg("host"), nb::call_guard<nb::gil_scoped_release>())
        .def("enable_keepalive", &Endpoint::enable_keepalive, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "routes",
            [](Endpoint& d) {
                std::vector<std::vector<std::tuple<std::string, std::uint16_t, bool, bool>>> all;
                for (const std::vector<Routes::Route>& lane : d.routes()) {
                    all.emplace_back();
                    for (const Routes::Route& each : lane)
                        all.back().emplace_back(each.address.host(), each.address.port(), each.answers, each.learned);
                }
                return all;
            },
            nb::call_guard<nb::gil_scoped_release>())
        .def("use_shared_memory", &Endpoint::use_shared_memory, nb::arg("peer"), nb::arg("incarnation"),
             nb::call_guard<nb::gil_scoped_release>())
        .def("near", &Endpoint::near, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "close", [](Endpoint& d, double linger_s) { d.close(to_nanos(linger_s)); }, nb::arg("linger_s"),
            nb::call_guard<nb::gil_scoped_release>())
        .def("health",
             [](Endpoint& d) -> Mapping {
                 // The driving thread may hold the engine's lock for a while: release the GIL meanwhile.
                 const Driver::Health health = [&d] {
                     const nb::gil_scoped_release released;
                     return d.health();
                 }();
                 nb::dict all = to_dict(health.counters, counter_names);
                 all["faults"] = to_dict(health.faults, fault_names);
                 all["overflow"] = health.overflow;
                 all["segments"] = health.segments;
                 all["coalesces"] = health.coalesces;
                 return all;
             })
        .def(
            "lane_bytes_sent", [](Endpoint& d) { return d.health().lane_bytes_sent; },
            nb::call_guard<nb::gil_scoped_release>())
        .def(
            "links",
            [](Endpoint& d, const std::vector<std::uint16_t>& peers) {
                std::vector<std::tuple<double, double, double, std::size_t>> all;
                for (const Driver::LinkHealth& link : d.links(peers))
                    all.emplace_back(static_cast<double>(link.round_trip) * 1e-9, link.loss, link.bytes_per_s,
                                     link.path_bytes);
                return all;
            },
            nb::arg("peers"), nb::call_guard<nb::gil_scoped_release>())
        .def(
            "paths",
            [](Endpoint& d, std::uint16_t peer) {
                std::vector<std::tuple<bool, double, double, double, std::uint64_t, std::uint64_t, std::uint32_t>> all;
                const std::vector<Driver::LinkHealth> links = d.links({peer});
                for (const PathHealth& each : links.front().paths)
                    all.emplace_back(each.up, static_cast<double>(each.round_trip) * 1e-9, each.loss, each.bytes_per_s,
                                     each.bytes_sent, each.bytes_received, each.outages);
                return all;
            },
            nb::arg("peer"), nb::call_guard<nb::gil_scoped_release>())
        .def(
            "take_bottleneck_peaks", [](Endpoint& d) { return to_tuple(d.take_bottleneck_peaks()); },
            nb::call_guard<nb::gil_scoped_release>());

    endpoint.def("wait_view", &wait_view, nb::arg("above"), nb::arg("timeout_s").none() = nb::none());
    python::define_views<>(endpoint, "advance", [](Endpoint& d, auto&& work) {
        const nb::gil_scoped_release released;
        return d.with_views(work);
    });

    // Defined by the lab's module: a network that a simulation shares with other traffic.
    nb::class_<Medium>(m, "Medium");
    nb::class_<Sim> simulation(m, "Sim");
    simulation
        .def(
            "__init__",
            [](Sim* self, std::uint16_t world, const Mapping& core, const Mapping& faults, double delay_s,
               double bytes_per_s, std::size_t queue_bytes, Medium* medium) {
                new (self) Sim({.core = make_core_config(0, world, core),
                                .faults = to_fault_settings(faults),
                                .delay = to_nanos(delay_s),
                                .bytes_per_s = bytes_per_s,
                                .queue_bytes = queue_bytes,
                                .medium = medium});
            },
            nb::arg("world"), nb::arg("core"), nb::arg("faults"), nb::arg("delay_s"), nb::arg("bytes_per_s"),
            nb::arg("queue_bytes"), nb::arg("medium").none() = nb::none(), nb::keep_alive<1, 8>())
        .def_prop_ro("now_s", [](const Sim& s) { return static_cast<double>(s.now()) * 1e-9; })
        .def(
            "post",
            [](Sim& s, std::uint16_t rank, std::uint32_t channel, std::uint32_t seq, const std::vector<PySend>& sends,
               const std::vector<PyReceive>& receives, const std::optional<PyReduction>& reduction,
               std::pair<double, double> budgets, std::pair<std::optional<double>, std::optional<double>> deadlines_s,
               std::optional<double> timeout_s, std::uint32_t view,
               std::pair<std::optional<double>, std::optional<double>> redundancies) {
                return s.post(rank, make_spec(channel, seq, sends, receives, reduction, budgets, deadlines_s, timeout_s,
                                              view, redundancies));
            },
            nb::arg("rank"), nb::arg("channel"), nb::arg("seq"), nb::arg("sends"), nb::arg("receives"),
            nb::arg("reduction").none(), nb::arg("budgets"), nb::arg("deadlines_s"), nb::arg("timeout_s").none(),
            nb::arg("view") = 0,
            nb::arg("redundancies") = std::pair<std::optional<double>, std::optional<double>>{0.0, 0.0})
        .def("cancel", &Sim::cancel, nb::arg("rank"), nb::arg("id"))
        .def(
            "can_complete",
            [](Sim& s, std::uint16_t rank, std::uint64_t id) { return s.core(rank).can_complete(id, s.now()); },
            nb::arg("rank"), nb::arg("id"))
        .def(
            "peek",
            [](Sim& s, std::uint16_t rank, std::uint32_t channel, std::uint32_t seq) {
                return to_list(s.core(rank).peek(channel, seq));
            },
            nb::arg("rank"), nb::arg("channel"), nb::arg("seq"))
        .def(
            "advance",
            [](Sim& s, std::size_t most) {
                std::size_t steps = 0;
                while (steps < most && s.advance()) ++steps;
                return steps;
            },
            nb::arg("most") = 1)
        .def(
            "take_finished",
            [](Sim& s, std::uint16_t rank) {
                nb::typed<nb::list, nb::typed<nb::tuple, std::uint64_t, Outcome>> all;
                for (auto& finished : s.take_finished(rank))
                    all.append(nb::make_tuple(finished.id, nb::cast(std::move(finished.outcome))));
                return all;
            },
            nb::arg("rank"))
        .def("set_unreachable", &Sim::set_unreachable, nb::arg("rank"), nb::arg("unreachable"))
        .def("set_link", &Sim::set_link, nb::arg("from_"), nb::arg("to"), nb::arg("unreachable"))
        .def("restart", &Sim::restart, nb::arg("rank"), nb::arg("incarnation"))
        .def("readmit", &Sim::readmit, nb::arg("rank"), nb::arg("peer"))
        .def(
            "view_number", [](Sim& s, std::uint16_t rank) { return s.core(rank).view_number(); }, nb::arg("rank"))
        .def("set_link_rate", &Sim::set_link_rate, nb::arg("rank"), nb::arg("up"), nb::arg("down"))
        .def(
            "take_bottleneck_peaks",
            [](Sim& s, std::uint16_t rank) { return to_tuple(s.core(rank).take_bottleneck_peaks()); }, nb::arg("rank"))
        .def_prop_ro("queue_drops", &Sim::queue_drops)
        .def("health", [](Sim& s, std::uint16_t rank) -> Mapping {
            nb::dict all = to_dict(s.core(rank).counters(), counter_names);
            all["faults"] = to_dict(s.fault_counters(rank), fault_names);
            return all;
        });

    simulation.def(
        "run_until",
        [](Sim& s, double at_s) {
            if (!(at_s >= 0 && at_s < 1e9)) throw std::invalid_argument("at_s must be a time");
            const nb::gil_scoped_release released;
            s.run_until(std::llround(at_s * 1e9));
        },
        nb::arg("at_s"));
    python::define_views<std::uint16_t>(
        simulation, "advance_to", [](Sim& s, std::uint16_t rank, auto&& work) { return s.with_views(rank, work); },
        nb::arg("rank"));

    m.def(
        "set_faults",
        [](const std::optional<Mapping>& settings) {
            Driver::set_faults(settings ? std::make_shared<const FaultSettings>(to_fault_settings(*settings))
                                        : nullptr);
        },
        nb::arg("settings").none());
    m.def(
        "crc32c",
        [](const nb::bytes& data) { return crc32c({static_cast<const std::byte*>(data.data()), data.size()}); },
        nb::arg("data"));
    m.def(
        "crc32c_at",
        [](std::uintptr_t address, std::size_t bytes, std::uint32_t seed) {
            return crc32c({reinterpret_cast<const std::byte*>(address), bytes}, seed);
        },
        nb::arg("address"), nb::arg("bytes"), nb::arg("seed"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "grid_bytes",
        [](int dtype, std::size_t elements, std::size_t chunk_bytes) {
            return grid_bytes(to_enum("dtype", dtype, Dtype::int4), elements, chunk_bytes);
        },
        nb::arg("dtype"), nb::arg("elements"), nb::arg("chunk_bytes"));
    m.def(
        "grid_elements",
        [](int dtype, std::size_t chunk_bytes) {
            return grid_elements(to_enum("dtype", dtype, Dtype::int4), chunk_bytes);
        },
        nb::arg("dtype"), nb::arg("chunk_bytes"));
    m.def(
        "grid_encode",
        [](int dtype, std::uintptr_t from, std::size_t elements, std::size_t chunk_bytes, std::uint64_t seed,
           std::uintptr_t out) {
            grid_encode_message(to_enum("dtype", dtype, Dtype::int4), reinterpret_cast<const float*>(from), elements,
                                chunk_bytes, seed, reinterpret_cast<std::byte*>(out));
        },
        nb::arg("dtype"), nb::arg("from_"), nb::arg("elements"), nb::arg("chunk_bytes"), nb::arg("seed"),
        nb::arg("out"), nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "grid_decode",
        [](int dtype, std::uintptr_t from, std::size_t elements, std::size_t chunk_bytes, std::uintptr_t out) {
            grid_decode_message(to_enum("dtype", dtype, Dtype::int4), reinterpret_cast<const std::byte*>(from),
                                elements, chunk_bytes, reinterpret_cast<float*>(out));
        },
        nb::arg("dtype"), nb::arg("from_"), nb::arg("elements"), nb::arg("chunk_bytes"), nb::arg("out"),
        nb::call_guard<nb::gil_scoped_release>());
    m.def(
        "copy_finite",
        [](unsigned dtype, const std::vector<std::tuple<std::uintptr_t, std::uintptr_t, std::size_t>>& copies) {
            bool finite = true;
            for (const auto& [from, to, elements] : copies)
                finite = copy_finite(static_cast<Dtype>(dtype), reinterpret_cast<const std::byte*>(from), elements,
                                     reinterpret_cast<std::byte*>(to)) &&
                         finite;
            return finite;
        },
        nb::arg("dtype"), nb::arg("copies"), nb::call_guard<nb::gil_scoped_release>());
    m.def("interface_mtu", &interface_mtu, nb::arg("host"));
    m.def(
        "datagram_bytes",
        [](const std::string& host, std::size_t mtu) { return datagram_bytes_for(mtu, Address(host, 0).family()); },
        nb::arg("host"), nb::arg("mtu"));
    m.def(
        "parity_that_pays",
        [](double loss, double burst, double round_trip_s, double chunk_s, std::size_t chunks, std::size_t blocks,
           std::size_t after, double messages) {
            return parity_that_pays({loss, burst, round_trip_s, chunk_s}, {chunks, blocks, after, messages});
        },
        nb::arg("loss"), nb::arg("burst"), nb::arg("round_trip_s"), nb::arg("chunk_s"), nb::arg("chunks"),
        nb::arg("blocks"), nb::arg("after"), nb::arg("messages"));
    m.def("chunk_bytes", &Core::chunk_bytes_for, nb::arg("datagram_bytes"), nb::arg("sealed"));
}
