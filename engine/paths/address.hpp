// Socket addresses, and the MTU of the interface that owns one.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace storm {

// A numeric IPv4 or IPv6 address and a port.
class Address {
public:
    Address() = default;
    // Throws std::invalid_argument for anything but a numeric address.
    Address(const std::string& host, std::uint16_t port);

    [[nodiscard]] const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage_); }
    [[nodiscard]] socklen_t size() const;
    [[nodiscard]] int family() const { return storage_.ss_family; }
    [[nodiscard]] std::uint16_t port() const;
    // As the constructor takes it; empty for an address of neither family.
    [[nodiscard]] std::string host() const;
    friend bool operator==(const Address& one, const Address& other);

private:
    friend class Socket;
    sockaddr_storage storage_{};
};

// The MTU of the interface that owns a numeric address; 0 when no interface does.
[[nodiscard]] std::size_t interface_mtu(const std::string& host);
// The number of the interface that owns an address; 0 when none does.
[[nodiscard]] unsigned interface_index(const Address& address);
// The largest UDP payload of an interface with this MTU.
[[nodiscard]] std::size_t datagram_bytes_for(std::size_t mtu, int family);

}  // namespace storm
