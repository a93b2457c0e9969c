#include "math/reduction.hpp"

#include <algorithm>
#include <cstring>

#include "math/grid.hpp"

namespace storm {

Reduction::Reduction(const ReductionSpec& spec, std::uint32_t contributors, std::size_t chunk_bytes, BlockPool& blocks)
    : spec_(spec),
      contributors_(contributors),
      chunks_(static_cast<std::uint32_t>(spec.bytes == 0 ? 1 : (spec.bytes + chunk_bytes - 1) / chunk_bytes)),
      chunk_bytes_(chunk_bytes),
      blocks_(blocks),
      pending_(chunks_, static_cast<std::uint16_t>(contributors)),
      count_(chunks_, spec.mode == Reduce::copy ? std::uint16_t{0} : std::uint16_t{1}) {
    final_.reserve(chunks_);
    if (spec_.mode == Reduce::in_order) {
        sums_.resize(chunks_);
        if (contributors_ > 1) waiting_.resize(std::size_t{chunks_} * contributors_);
    }
    if (spec_.mode == Reduce::arrived && spec_.out_dtype != Dtype::float32) {
        wide_sum_ = std::make_unique_for_overwrite<float[]>(first_element(chunks_ - 1) + elements(chunks_ - 1));
    }
    if (contributors_ == 0) {
        for (std::uint32_t chunk = 0; chunk < chunks_; ++chunk) {
            if (spec_.mode == Reduce::in_order) fold(chunk, 0, nullptr);
            finish(chunk);
        }
    }
}

Reduction::~Reduction() {
    for (auto& block : waiting_) blocks_.release(std::move(block));
    for (Sum& sum : sums_) blocks_.release(std::move(sum.early));
}

void Reduction::contribute(std::uint32_t contributor, std::uint32_t chunk, std::span<const std::byte> payload) {
    ++count_[chunk];
    switch (spec_.mode) {
        case Reduce::copy:
            if (!payload.empty()) std::memcpy(out_at(chunk), payload.data(), payload.size());
            break;
        case Reduce::arrived: {
            const std::size_t count = elements(chunk);
            const std::byte* own = spec_.own + chunk * chunk_bytes_;
            if (count_[chunk] == 2) {
                add_first(spec_.wire, own, payload.data(), count, sum_at(chunk));
            } else {
                add(spec_.wire, payload.data(), count, sum_at(chunk));
            }
            break;
        }
        case Reduce::in_order:
            // The next contribution in order is summed straight from the receive buffer; others are copied to blocks.
            if (is_next(chunk, contributor) || pending_[chunk] == 1) {
                fold(chunk, contributor, payload.data());
            } else if (!payload.empty()) {
                auto block = blocks_.take();
                std::memcpy(block.get(), payload.data(), payload.size());
                waiting_[std::size_t{chunk} * contributors_ + contributor] = std::move(block);
            }
            break;
    }
    settle(chunk);
}

void Reduction::mark_missing(std::uint32_t contributor, std::uint32_t chunk) {
    if (spec_.mode == Reduce::in_order) {
        if (missing_.empty()) missing_.resize(std::size_t{chunks_} * contributors_);
        missing_[std::size_t{chunk} * contributors_ + contributor] = true;
        if (is_next(chunk, contributor) || pending_[chunk] == 1) fold(chunk, contributor, nullptr);
    }
    settle(chunk);
}

void Reduction::settle(std::uint32_t chunk) {
    if (--pending_[chunk] == 0) finish(chunk);
}

void Reduction::finish(std::uint32_t chunk) {
    const std::size_t count = spec_.mode == Reduce::arrived ? elements(chunk) : 0;
    if (count > 0) {
        float* sum = sum_at(chunk);
        if (count_[chunk] == 1) widen(spec_.wire, spec_.own + chunk * chunk_bytes_, count, sum);
        const float by = divisor(count_[chunk]);
        if (has_grids(spec_.out_dtype)) {
            grid_encode(spec_.out_dtype, sum, count, 1.0F / by, spec_.seed + first_element(chunk), out_at(chunk));
        } else if (wide_sum_ || by != 1.0F) {
            divide_into(sum, by, count, spec_.out_dtype, out_at(chunk));
        }
    }
    final_.push_back(chunk);
}

bool Reduction::is_next(std::uint32_t chunk, std::uint32_t contributor) const {
    // A sum of 16-bit values is rounded once, at the end, so its terms are kept until all have arrived.
    if (spec_.wire != Dtype::float32) return false;
    const std::uint32_t terms = sums_[chunk].terms, own = spec_.own_position;
    // Our own term is always present.
    const std::uint32_t next = terms == own ? terms + 1 : terms;
    return next == (contributor < own ? contributor : contributor + 1);
}

// Adds all terms up to the first that is missing. `payload`: the contribution that has just arrived; null if there is
// none.
void Reduction::fold(std::uint32_t chunk, std::uint32_t contributor, const std::byte* payload) {
    const std::size_t count = elements(chunk);
    if (count == 0) return;
    Sum& sum = sums_[chunk];
    const std::uint32_t own = spec_.own_position, first = sum.terms;
    auto* waiting = waiting_.empty() ? nullptr : &waiting_[std::size_t{chunk} * contributors_];
    inputs_.clear();
    if (sum.early) inputs_.push_back(sum.early.get());
    if (first > own) inputs_.push_back(out_at(chunk));
    for (; sum.terms <= contributors_; ++sum.terms) {
        if (sum.terms == own) {
            inputs_.push_back(spec_.own + chunk * chunk_bytes_);
            continue;
        }
        const std::uint32_t each = sum.terms < own ? sum.terms : sum.terms - 1;
        if (payload != nullptr && each == contributor) {
            inputs_.push_back(payload);
        } else if (waiting != nullptr && waiting[each]) {
            inputs_.push_back(waiting[each].get());
        } else if (missing_.empty() || !missing_[std::size_t{chunk} * contributors_ + each]) {
            break;
        }
    }
    const bool complete = sum.terms > contributors_;
    const float by = complete ? divisor(count_[chunk]) : 1.0F;
    if (sum.terms > own) {
        sum_in_order(spec_.wire, inputs_, count, by, spec_.out_dtype, out_at(chunk));
        blocks_.release(std::move(sum.early));
    } else if (!inputs_.empty()) {
        if (!sum.early) sum.early = blocks_.take();
        sum_in_order(spec_.wire, inputs_, count, by, spec_.wire, sum.early.get());
    }
    if (waiting == nullptr) return;
    for (std::uint32_t term = first; term < sum.terms; ++term) {
        if (term != own) blocks_.release(std::move(waiting[term < own ? term : term - 1]));
    }
}

float Reduction::divisor(std::uint32_t count) const {
    const auto copies = static_cast<float>(count);
    if (spec_.average) return copies;
    // An exact sum lacks only ranks that are no longer members: it is the sum over the members.
    return spec_.mode == Reduce::in_order ? 1.0F : copies / static_cast<float>(contributors_ + 1);
}

std::size_t Reduction::wire_bytes(std::uint32_t chunk) const {
    return chunk + 1 < chunks_ ? chunk_bytes_ : spec_.bytes - std::size_t{chunks_ - 1} * chunk_bytes_;
}

std::size_t Reduction::elements(std::uint32_t chunk) const {
    const std::size_t held = elements_in(spec_.wire, wire_bytes(chunk));
    return spec_.elements == 0 ? held : std::min<std::size_t>(held, spec_.elements - first_element(chunk));
}

std::byte* Reduction::out_at(std::uint32_t chunk) const {
    if (spec_.out_dtype == spec_.wire) return spec_.out + chunk * chunk_bytes_;
    return spec_.out + first_element(chunk) * element_bytes(spec_.out_dtype);
}

float* Reduction::sum_at(std::uint32_t chunk) {
    const std::size_t first = first_element(chunk);
    return wide_sum_ ? wide_sum_.get() + first : reinterpret_cast<float*>(spec_.out) + first;
}

}  // namespace storm
