#include "traffic/shared_network.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace storm {

SharedNetwork::SharedNetwork(std::size_t hosts, const SharedNetworkSettings& lines)
    : hosts_(hosts), priority_(lines.priority), header_bytes_(lines.header_bytes), network_(hosts, lines.network) {}

Nanos SharedNetwork::next_at() const {
    return service_ ? std::min(network_.next_at(), service_->next_at()) : network_.next_at();
}

void SharedNetwork::send(Datagram datagram, Nanos now) {
    const auto size = static_cast<std::uint32_t>(datagram.bytes.size());
    network_.send({.source = datagram.source,
                   .target = datagram.target,
                   .priority = priority_,
                   .wire_bytes = size + header_bytes_,
                   .datagram = std::move(datagram.bytes)},
                  now);
}

std::optional<Medium::Datagram> SharedNetwork::step(Nanos now) {
    if (service_ && service_->next_at() < network_.next_at()) {
        service_->tick(now, network_);
        return std::nullopt;
    }
    std::optional<SimPacket> packet = network_.step();
    if (!packet) return std::nullopt;
    if (packet->segment) {
        service_->receive(*packet, now, network_);
        return std::nullopt;
    }
    return Datagram{packet->source, packet->target, std::move(packet->datagram)};
}

void SharedNetwork::serve(const ServiceSettings& settings, Nanos now) {
    if (service_) throw std::logic_error("a service runs already");
    service_.emplace(settings, hosts_, now);
}

SimService& SharedNetwork::service() {
    if (!service_) throw std::logic_error("no service runs");
    return *service_;
}

}  // namespace storm
