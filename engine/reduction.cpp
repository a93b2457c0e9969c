#include "reduction.hpp"

#include <cstring>

#include "int8.hpp"

namespace storm {

Reduction::Reduction(const ReductionSpec& spec, std::uint32_t contributors, std::size_t chunk_bytes, Blocks& blocks)
    : spec_(spec),
      contributors_(contributors),
      chunks_(static_cast<std::uint32_t>(spec.bytes == 0 ? 1 : (spec.bytes + chunk_bytes - 1) / chunk_bytes)),
      chunk_bytes_(chunk_bytes),
      blocks_(blocks),
      pending_(chunks_, static_cast<std::uint16_t>(contributors)),
      count_(chunks_, spec.mode == Reduce::copy ? std::uint16_t{0} : std::uint16_t{1}) {
    final_.reserve(chunks_);
    if (spec_.mode == Reduce::in_order && contributors_ > 1) waiting_.resize(std::size_t{chunks_} * contributors_);
    if (spec_.mode == Reduce::arrived && spec_.out_dtype != Dtype::float32) {
        wide_sum_ = std::make_unique_for_overwrite<float[]>(first_element(chunks_ - 1) + elements(chunks_ - 1));
    }
    if (contributors_ == 0) {
        for (std::uint32_t chunk = 0; chunk < chunks_; ++chunk) finish(chunk, 0, nullptr);
    }
}

Reduction::~Reduction() {
    for (auto& block : waiting_) blocks_.give_back(std::move(block));
}

void Reduction::contribute(std::uint32_t contributor, std::uint32_t chunk, std::span<const std::byte> payload) {
    ++count_[chunk];
    switch (spec_.mode) {
        case Reduce::copy:
            if (!payload.empty()) std::memcpy(out_at(chunk), payload.data(), payload.size());
            break;
        case Reduce::arrived: {
            const std::size_t count = elements_in(spec_.wire, payload.size());
            const std::byte* own = spec_.own + chunk * chunk_bytes_;
            if (count_[chunk] == 2) {
                add_first(spec_.wire, own, payload.data(), count, sum_at(chunk));
            } else {
                add(spec_.wire, payload.data(), count, sum_at(chunk));
            }
            break;
        }
        case Reduce::in_order:
            // The last to arrive is summed where the kernel put it; the others wait in blocks.
            if (pending_[chunk] > 1) {
                auto block = blocks_.take();
                if (!payload.empty()) std::memcpy(block.get(), payload.data(), payload.size());
                waiting_[std::size_t{chunk} * contributors_ + contributor] = std::move(block);
            }
            break;
    }
    settle(chunk, contributor, payload.data());
}

void Reduction::give_up(std::uint32_t contributor, std::uint32_t chunk) { settle(chunk, contributor, nullptr); }

void Reduction::settle(std::uint32_t chunk, std::uint32_t contributor, const std::byte* payload) {
    if (--pending_[chunk] == 0) finish(chunk, contributor, payload);
}

void Reduction::finish(std::uint32_t chunk, std::uint32_t last, const std::byte* last_payload) {
    const std::size_t count = spec_.mode == Reduce::copy ? 0 : elements(chunk);
    if (count > 0 && spec_.mode == Reduce::in_order) finish_in_order(chunk, last, last_payload);
    if (count > 0 && spec_.mode == Reduce::arrived) {
        float* sum = sum_at(chunk);
        if (count_[chunk] == 1) widen(spec_.wire, spec_.own + chunk * chunk_bytes_, count, sum);
        const float factor = scale(count_[chunk]);
        if (spec_.out_dtype == Dtype::int8) {
            int8_encode(sum, count, factor, spec_.seed + first_element(chunk), out_at(chunk));
        } else if (wide_sum_ || factor != 1.0F) {
            scale_into(sum, factor, count, spec_.out_dtype, out_at(chunk));
        }
    }
    final_.push_back(chunk);
}

void Reduction::finish_in_order(std::uint32_t chunk, std::uint32_t last, const std::byte* last_payload) {
    inputs_.clear();
    for (std::uint32_t i = 0; i <= contributors_; ++i) {
        if (i == spec_.own_position) inputs_.push_back(spec_.own + chunk * chunk_bytes_);
        if (i == contributors_) break;
        const std::byte* input = nullptr;
        if (last_payload != nullptr && i == last) {
            input = last_payload;
        } else if (!waiting_.empty()) {
            input = waiting_[std::size_t{chunk} * contributors_ + i].get();
        }
        if (input != nullptr) inputs_.push_back(input);
    }
    sum_in_order(spec_.wire, inputs_, elements(chunk), scale(static_cast<std::uint32_t>(inputs_.size())),
                 spec_.out_dtype, out_at(chunk));
    if (waiting_.empty()) return;
    for (std::uint32_t i = 0; i < contributors_; ++i) {
        blocks_.give_back(std::move(waiting_[std::size_t{chunk} * contributors_ + i]));
    }
}

float Reduction::scale(std::uint32_t count) const {
    const auto world = static_cast<float>(contributors_ + 1);
    if (spec_.average) return 1.0F / static_cast<float>(count);
    return count == contributors_ + 1 ? 1.0F : world / static_cast<float>(count);
}

std::size_t Reduction::wire_bytes(std::uint32_t chunk) const {
    return chunk + 1 < chunks_ ? chunk_bytes_ : spec_.bytes - std::size_t{chunks_ - 1} * chunk_bytes_;
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
