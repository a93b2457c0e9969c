#include "exchange/lanes.hpp"

#include <algorithm>
#include <utility>

#include "math/kernels.hpp"

namespace storm {
namespace {

void append(std::vector<std::uint64_t>& mask, std::uint32_t bits, const std::vector<std::uint64_t>& more,
            std::uint32_t more_bits) {
    mask.resize((std::size_t{bits} + more_bits + 63) / 64);
    for (std::uint32_t bit = 0; bit < more_bits; ++bit) {
        const std::uint64_t value = more[bit / 64] >> (bit % 64) & 1;
        mask[(bits + bit) / 64] |= value << ((bits + bit) % 64);
    }
}

}  // namespace

std::size_t Lanes::lanes_of(std::uint64_t message_bytes) const {
    const std::uint64_t most = std::min(message_bytes / least_part, message_bytes / chunk_bytes);
    return static_cast<std::size_t>(std::clamp<std::uint64_t>(most, 1, lanes));
}

std::size_t Lanes::lanes_of(const ExchangeSpec& spec) const {
    std::uint64_t largest = spec.reduction ? spec.reduction->bytes : 0;
    for (const SendSpec& send : spec.sends) largest = std::max(largest, send.bytes);
    for (const ReceiveSpec& receive : spec.receives) largest = std::max(largest, receive.bytes);
    return lanes_of(largest);
}

Lanes::Run Lanes::run_of(std::uint64_t message_bytes, std::size_t lane) const {
    const std::size_t used = lanes_of(message_bytes);
    if (lane >= used) return {.empty = true};
    const std::uint64_t chunks = (message_bytes + chunk_bytes - 1) / chunk_bytes;
    const std::uint64_t first = chunks * lane / used * chunk_bytes, end = chunks * (lane + 1) / used * chunk_bytes;
    return {.first = first, .bytes = std::min(end, message_bytes) - first};
}

ExchangeSpec Lanes::part_of(const ExchangeSpec& spec, std::size_t lane) const {
    ExchangeSpec part;
    part.channel = spec.channel;
    part.seq = spec.seq;
    part.stages = spec.stages;
    part.timeout_at = spec.timeout_at;
    part.view = spec.view;
    for (SendSpec send : spec.sends) {
        const Run run = run_of(send.bytes, lane);
        if (run.empty) continue;
        if (send.data != nullptr) send.data += run.first;
        send.whole = send.bytes;
        send.bytes = run.bytes;
        part.sends.push_back(send);
    }
    for (ReceiveSpec receive : spec.receives) {
        const Run run = run_of(receive.bytes, lane);
        if (run.empty) continue;
        if (receive.into != nullptr) receive.into += run.first;
        receive.whole = receive.bytes;
        receive.bytes = run.bytes;
        part.receives.push_back(receive);
    }
    if (!spec.reduction) return part;
    const Run run = run_of(spec.reduction->bytes, lane);
    if (run.empty) return part;
    ReductionSpec reduction = *spec.reduction;
    // Runs begin at chunk boundaries, and a chunk holds a whole number of elements, also of types with grids.
    const std::size_t element = run.first / chunk_bytes * elements_in(reduction.wire, chunk_bytes);
    const bool as_sent = reduction.out_dtype == reduction.wire;
    if (reduction.own != nullptr) reduction.own += run.first;
    reduction.out += as_sent ? run.first : element * element_bytes(reduction.out_dtype);
    reduction.bytes = run.bytes;
    reduction.seed += element;
    if (reduction.elements != 0) reduction.elements -= element;  // may exceed the lane's part, which its chunks bound
    part.reduction = reduction;
    return part;
}

void merge_outcome(Outcome& whole, Outcome&& part) {
    const auto weight = [](Status status) {
        if (status == Status::ok) return 0;
        return status == Status::closed ? 1 : 2;
    };
    if (weight(part.status) > weight(whole.status)) {
        whole.status = part.status;
        whole.peer = part.peer;
        whole.failure_cause = part.failure_cause;
        whole.missing_bytes = part.missing_bytes;
        whole.expected_bytes = part.expected_bytes;
        whole.announced_bytes = part.announced_bytes;
    }
    whole.repaired += part.repaired;
    whole.started = std::min(whole.started, part.started);
    whole.ended = std::max(whole.ended, part.ended);
    for (Arrival& more : part.arrivals) {
        const auto same = [&](const Arrival& each) {
            return each.peer == more.peer && each.second_stage == more.second_stage;
        };
        const auto found = std::find_if(whole.arrivals.begin(), whole.arrivals.end(), same);
        if (found == whole.arrivals.end()) {
            whole.arrivals.push_back(std::move(more));
            continue;
        }
        append(found->mask, found->chunks, more.mask, more.chunks);
        found->chunks += more.chunks;
        found->arrived += more.arrived;
        found->recovered += more.recovered;
        found->bytes += more.bytes;
        found->missing_bytes += more.missing_bytes;
    }
    whole.counts.insert(whole.counts.end(), part.counts.begin(), part.counts.end());
}

}  // namespace storm
