#include "exchange/exchange_spec.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "math/grid.hpp"

namespace storm {

void validate(const ExchangeSpec& spec, std::uint16_t rank, std::uint16_t world) {
    std::vector<std::uint8_t> seen(world);
    const auto check = [&](std::uint16_t peer, std::uint64_t bytes, std::uint8_t once) {
        if (peer >= world || peer == rank) throw std::invalid_argument("a peer must be another rank of the world");
        if (bytes > std::numeric_limits<std::uint32_t>::max())
            throw std::invalid_argument("a message is limited to 4 GiB");
        if ((seen[peer] & once) != 0) throw std::invalid_argument("only one message per peer and stage is allowed");
        seen[peer] = static_cast<std::uint8_t>(seen[peer] | once);
    };
    for (const SendSpec& send : spec.sends) {
        check(send.peer, send.bytes, send.second_stage ? 2 : 1);
        if (send.second_stage && (!spec.reduction || spec.reduction->bytes != send.bytes)) {
            throw std::invalid_argument("the second stage must send the result of the reduction");
        }
    }
    for (const ReceiveSpec& receive : spec.receives) {
        check(receive.peer, receive.bytes, receive.second_stage ? 8 : 4);
        if (receive.reduce && (!spec.reduction || spec.reduction->bytes != receive.bytes || receive.second_stage)) {
            throw std::invalid_argument(
                "a contribution must belong to the first stage and have the size of the reduction");
        }
    }
    if (spec.reduction) {
        const ReductionSpec& reduction = *spec.reduction;
        if (reduction.out_dtype != reduction.wire && reduction.out_dtype != Dtype::float32)
            throw std::invalid_argument("the output type of a reduction must be the wire type or float32");
        if (reduction.wire == Dtype::bytes && reduction.mode != Reduce::copy)
            throw std::invalid_argument("plain bytes cannot be added up");
        if (has_grids(reduction.wire) && reduction.mode == Reduce::in_order)
            throw std::invalid_argument("types with grids cannot be summed in rank order");
        const auto contributors =
            std::count_if(spec.receives.begin(), spec.receives.end(), [](const ReceiveSpec& r) { return r.reduce; });
        if (reduction.own_position > static_cast<std::size_t>(contributors))
            throw std::invalid_argument("own_position must not exceed the number of contributors");
    }
    for (const StageSpec& stage : spec.stages) {
        if (!(stage.budget >= 0.0 && stage.budget <= 1.0)) throw std::invalid_argument("budget must lie in [0, 1]");
        if (stage.redundancy != StageSpec::automatic &&
            !(stage.redundancy >= 0.0 && stage.redundancy <= StageSpec::most))
            throw std::invalid_argument("redundancy must lie in [0, 4] or be automatic");
    }
    if (spec.reduction && spec.reduction->mode == Reduce::copy) {
        // What we forward cannot be more complete than what we received.
        const auto& [first, second_one] = spec.stages;
        if (second_one.budget < first.budget || (second_one.deadline == never && first.deadline != never)) {
            throw std::invalid_argument("the second stage must allow at least as much loss as the first");
        }
    }
}

}  // namespace storm
