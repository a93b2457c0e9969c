#include "wire/sequences.hpp"

#include <stdexcept>

namespace storm {

void Sequences::post(std::uint32_t channel, std::uint32_t seq) {
    if (posted(channel, seq)) {
        throw std::invalid_argument("this sequence number of the channel was posted before");
    }
    Channel& known = channels_[channel];
    if (forgets_ && seq > known.next + most_remembered) {
        known.skipped.clear();
        known.next = seq - most_remembered;
    }
    if (seq > known.next && seq - known.next + known.skipped.size() > most_skipped) {
        throw std::invalid_argument("too many sequence numbers of the channel were skipped");
    }
    known.skipped.erase(seq);
    for (; known.next <= seq; ++known.next) {
        if (known.next != seq) known.skipped.insert(static_cast<std::uint32_t>(known.next));
    }
    while (forgets_ && known.skipped.size() > most_remembered) known.skipped.erase(known.skipped.begin());
}

bool Sequences::posted(std::uint32_t channel, std::uint32_t seq) const {
    const auto known = channels_.find(channel);
    return known != channels_.end() && seq < known->second.next && !known->second.skipped.contains(seq);
}

}  // namespace storm
