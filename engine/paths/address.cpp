#include "paths/address.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "base/descriptor.hpp"
#include "wire/wire.hpp"

namespace storm {

Address::Address(const std::string& host, std::uint16_t port) {
    auto* four = reinterpret_cast<sockaddr_in*>(&storage_);
    auto* six = reinterpret_cast<sockaddr_in6*>(&storage_);
    // A link-local IPv6 address needs its interface: fe80::1%eth0.
    const std::size_t percent = host.find('%');
    if (inet_pton(AF_INET, host.c_str(), &four->sin_addr) == 1) {
        four->sin_family = AF_INET;
        four->sin_port = htons(port);
    } else if (inet_pton(AF_INET6, host.substr(0, percent).c_str(), &six->sin6_addr) == 1) {
        six->sin6_family = AF_INET6;
        six->sin6_port = htons(port);
        if (percent != std::string::npos) six->sin6_scope_id = if_nametoindex(host.c_str() + percent + 1);
    } else {
        throw std::invalid_argument("not a numeric IPv4 or IPv6 address: " + host);
    }
}

socklen_t Address::size() const { return storage_.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in); }

std::uint16_t Address::port() const {
    return ntohs(storage_.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&storage_)->sin6_port
                                                : reinterpret_cast<const sockaddr_in*>(&storage_)->sin_port);
}

std::string Address::host() const {
    std::array<char, INET6_ADDRSTRLEN> text{};
    if (family() == AF_INET) {
        inet_ntop(AF_INET, &reinterpret_cast<const sockaddr_in*>(&storage_)->sin_addr, text.data(), text.size());
        return text.data();
    }
    if (family() != AF_INET6) return {};
    const auto* six = reinterpret_cast<const sockaddr_in6*>(&storage_);
    inet_ntop(AF_INET6, &six->sin6_addr, text.data(), text.size());
    std::array<char, IF_NAMESIZE> name{};
    const bool scoped = six->sin6_scope_id != 0 && if_indextoname(six->sin6_scope_id, name.data()) != nullptr;
    return scoped ? std::string(text.data()) + "%" + name.data() : text.data();
}

bool operator==(const Address& one, const Address& other) {
    if (one.family() != other.family() || one.port() != other.port()) return false;
    if (one.family() == AF_INET) {
        return reinterpret_cast<const sockaddr_in*>(&one.storage_)->sin_addr.s_addr ==
               reinterpret_cast<const sockaddr_in*>(&other.storage_)->sin_addr.s_addr;
    }
    const auto* first = reinterpret_cast<const sockaddr_in6*>(&one.storage_);
    const auto* second = reinterpret_cast<const sockaddr_in6*>(&other.storage_);
    return first->sin6_scope_id == second->sin6_scope_id &&
           std::memcmp(&first->sin6_addr, &second->sin6_addr, sizeof(in6_addr)) == 0;
}

namespace {

// Empty when no interface has the address.
std::string interface_of(const Address& wanted) {
    ifaddrs* all = nullptr;
    if (getifaddrs(&all) != 0) return {};
    const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> guard(all, freeifaddrs);
    const auto* wanted4 = reinterpret_cast<const sockaddr_in*>(wanted.get());
    for (const ifaddrs* each = all; each != nullptr; each = each->ifa_next) {
        if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != wanted.family()) continue;
        bool same = false;
        if (wanted.family() == AF_INET) {
            const auto* four = reinterpret_cast<const sockaddr_in*>(each->ifa_addr);
            // All of 127/8 is the loopback's, though only one address is listed.
            const bool loopback = (each->ifa_flags & IFF_LOOPBACK) != 0 && ntohl(wanted4->sin_addr.s_addr) >> 24 == 127;
            same = loopback || four->sin_addr.s_addr == wanted4->sin_addr.s_addr;
        } else {
            const auto* six = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr);
            same = std::memcmp(&six->sin6_addr, &reinterpret_cast<const sockaddr_in6*>(wanted.get())->sin6_addr,
                               sizeof(in6_addr)) == 0;
        }
        if (same) return each->ifa_name;
    }
    return {};
}

}  // namespace

std::size_t interface_mtu(const std::string& host) {
    const std::string name = interface_of(Address(host, 0));
    const Descriptor any(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (name.empty() || any.get() < 0) return 0;
    ifreq request{};
    std::strncpy(request.ifr_name, name.c_str(), IFNAMSIZ - 1);
    const bool known = ioctl(any.get(), SIOCGIFMTU, &request) == 0;
    return known ? static_cast<std::size_t>(request.ifr_mtu) : 0;
}

unsigned interface_index(const Address& address) {
    const std::string name = interface_of(address);
    return name.empty() ? 0 : if_nametoindex(name.c_str());
}

std::size_t datagram_bytes_for(std::size_t mtu, int family) {
    const std::size_t overhead = (family == AF_INET6 ? 40U : 20U) + 8U;
    return std::min(mtu > overhead ? mtu - overhead : 0, max_datagram_bytes);
}

}  // namespace storm
