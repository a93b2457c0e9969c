#include "io/socket.hpp"

#include <fcntl.h>
#include <linux/errqueue.h>
#include <netinet/icmp6.h>
#include <netinet/in.h>
#include <netinet/ip_icmp.h>
#include <netinet/udp.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

// Older headers lack these; older kernels refuse them, which is handled.
#ifndef UDP_SEGMENT
#define UDP_SEGMENT 103
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif
#ifndef IP_UNICAST_IF
#define IP_UNICAST_IF 50
#endif
#ifndef IPV6_UNICAST_IF
#define IPV6_UNICAST_IF 76
#endif
#ifndef SOL_UDP
#define SOL_UDP 17
#endif

namespace storm {
namespace {

constexpr int lower_effort = 1 << 2;  // DSCP 000001 in the upper six bits of the traffic class

bool try_option(int fd, int level, int option, int value) {
    return setsockopt(fd, level, option, &value, sizeof value) == 0;
}

// Not ENOBUFS: an interface has dropped the datagram, which counts as lost. (The kernel reports it only where it
// reports refusals, too.)
bool is_full(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

}  // namespace

Socket::Socket(const Address& address, const SocketConfig& config)
    : fd_(Descriptor::checked(socket(address.family(), SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0),
                              "cannot open a UDP socket")),
      family_(address.family()) {
    if (bind(fd(), address.get(), address.size()) != 0) {
        throw std::system_error(errno, std::generic_category(),
                                "cannot bind UDP port " + std::to_string(address.port()));
    }
    if (config.own_interface) {
        // Where two interfaces are in one network, the kernel would send everything over one of them.
        const auto index = static_cast<int>(htonl(interface_index(address)));
        if (address.family() == AF_INET6) {
            try_option(fd(), IPPROTO_IPV6, IPV6_UNICAST_IF, index);
        } else {
            try_option(fd(), IPPROTO_IP, IP_UNICAST_IF, index);
        }
    }
    // The privileged form may exceed net.core.rmem_max.
    const int wanted = static_cast<int>(std::min<std::size_t>(config.receive_buffer, 1 << 30));
    if (!try_option(fd(), SOL_SOCKET, SO_RCVBUFFORCE, wanted)) try_option(fd(), SOL_SOCKET, SO_RCVBUF, wanted);
    if (!try_option(fd(), SOL_SOCKET, SO_SNDBUFFORCE, wanted)) try_option(fd(), SOL_SOCKET, SO_SNDBUF, wanted);
    int granted = 0;
    socklen_t size = sizeof granted;
    getsockopt(fd(), SOL_SOCKET, SO_RCVBUF, &granted, &size);
    receive_buffer_ = static_cast<std::size_t>(granted) / 2;  // the kernel doubles it for its own overhead
    try_option(fd(), SOL_SOCKET, SO_RXQ_OVFL, 1);
    // The kernel stamps arrivals: the time of reading depends more on the scheduler than on the network.
    try_option(fd(), SOL_SOCKET, SO_TIMESTAMPNS, 1);
    // Probes find the size that a path carries (path_mtu.hpp). So forbid fragments on the way, and ignore ICMP messages
    // about the MTU, which can be forged.
    if (address.family() == AF_INET6) {
        try_option(fd(), IPPROTO_IPV6, IPV6_MTU_DISCOVER, IPV6_PMTUDISC_PROBE);
    } else {
        try_option(fd(), IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE);
    }
    if (config.refusals) {
        refusals_ = address.family() == AF_INET6 ? try_option(fd(), IPPROTO_IPV6, IPV6_RECVERR, 1)
                                                 : try_option(fd(), IPPROTO_IP, IP_RECVERR, 1);
    }
    segmentation_ = config.segmentation && try_option(fd(), SOL_UDP, UDP_SEGMENT, 0);
    coalescing_ = config.coalescing && try_option(fd(), SOL_UDP, UDP_GRO, 1);
    if (config.low_priority) {
        if (address.family() == AF_INET6) {
            try_option(fd(), IPPROTO_IPV6, IPV6_TCLASS, lower_effort);
        } else {
            try_option(fd(), IPPROTO_IP, IP_TOS, lower_effort);
        }
    }
    buffer_ = std::make_unique_for_overwrite<std::byte[]>(slots * slot_bytes);
    for (std::size_t slot = 0; slot < slots; ++slot) {
        parts_[slot] = {.iov_base = buffer_.get() + slot * slot_bytes, .iov_len = slot_bytes};
    }
}

void Socket::rebind(const Address& address, const SocketConfig& config) {
    const Socket fresh(address, config);
    if (dup3(fresh.fd(), fd(), O_CLOEXEC) < 0)
        throw std::system_error(errno, std::generic_category(), "cannot move a UDP socket");
    segmentation_ = fresh.segmentation_;
    coalescing_ = fresh.coalescing_;
    refusals_ = fresh.refusals_;
    receive_buffer_ = fresh.receive_buffer_;
    overflow_ = 0;
}

std::uint16_t Socket::port() const {
    Address bound;
    socklen_t size = sizeof bound.storage_;
    getsockname(fd(), reinterpret_cast<sockaddr*>(&bound.storage_), &size);
    return bound.port();
}

std::size_t Socket::send(std::span<Batch* const> batches, std::span<const Address> peers) {
    constexpr std::size_t most = 16;
    std::array<mmsghdr, most> messages;
    struct alignas(cmsghdr) SegmentSpace {
        std::byte bytes[CMSG_SPACE(sizeof(std::uint16_t))];
    };
    std::array<SegmentSpace, most> controls;
    std::size_t sent = 0;
    unsigned pending_errors = 0;
    while (sent < batches.size()) {
        std::size_t count = 0;
        for (; count < most && sent + count < batches.size(); ++count) {
            Batch& batch = *batches[sent + count];
            if (batch.segments() > 1 && !segmentation_) break;
            const Address& to = peers[batch.peer()];
            msghdr& header = messages[count].msg_hdr;
            header = {};
            header.msg_name = const_cast<sockaddr*>(to.get());
            header.msg_namelen = to.size();
            header.msg_iov = batch.parts().data();
            header.msg_iovlen = batch.parts().size();
            if (batch.segments() < 2) continue;
            header.msg_control = controls[count].bytes;
            header.msg_controllen = sizeof controls[count].bytes;
            cmsghdr* control = CMSG_FIRSTHDR(&header);
            control->cmsg_level = SOL_UDP;
            control->cmsg_type = UDP_SEGMENT;
            control->cmsg_len = CMSG_LEN(sizeof(std::uint16_t));
            const auto segment = static_cast<std::uint16_t>(batch.segment_bytes());
            std::memcpy(CMSG_DATA(control), &segment, sizeof segment);
        }
        if (count == 0) {
            if (!send_to(peers[batches[sent]->peer()], *batches[sent])) return sent;
            ++sent;
            continue;
        }
        const int done = sendmmsg(fd(), messages.data(), static_cast<unsigned>(count), 0);
        if (done > 0) {
            sent += static_cast<std::size_t>(done);
            continue;
        }
        if (errno == EINTR) continue;
        if (is_full(errno)) return sent;
        if (has_pending_error(pending_errors)) continue;
        Batch& first = *batches[sent];
        const bool refused = errno == EIO || errno == EINVAL || errno == EOPNOTSUPP || errno == EMSGSIZE;
        if (first.segments() > 1 && refused) {
            // Either each datagram is too large for the interface, or this kernel or device accepts the option but
            // refuses segments: sending one by one shows which.
            if (!send_to(peers[first.peer()], first)) return sent;
            // A batch larger than any datagram is refused, too, whether or not segments work.
            segmentation_ = first.too_large() || first.bytes() > max_datagram_bytes;
        } else if (errno == EMSGSIZE) {
            first.mark_too_large();
        }
        ++sent;
    }
    return sent;
}

bool Socket::send_to(const Address& to, Batch& batch) {
    // Every segment has the same number of parts: a header and, unless it is empty, a payload.
    const std::size_t parts = batch.parts().size() / batch.segments();
    std::array<mmsghdr, Batch::max_segments> messages{};
    for (std::size_t i = 0; i < batch.segments(); ++i) {
        msghdr& header = messages[i].msg_hdr;
        header.msg_name = const_cast<sockaddr*>(to.get());
        header.msg_namelen = to.size();
        header.msg_iov = batch.parts().data() + parts * i;
        header.msg_iovlen = parts;
    }
    std::size_t sent = 0;
    unsigned pending_errors = 0;
    while (sent < batch.segments()) {
        const int done = sendmmsg(fd(), messages.data() + sent, static_cast<unsigned>(batch.segments() - sent), 0);
        if (done > 0) {
            sent += static_cast<std::size_t>(done);
        } else if (errno != EINTR) {
            // A full buffer at the start means try again; in the middle the rest counts as lost.
            if (is_full(errno)) return sent > 0;
            if (has_pending_error(pending_errors)) continue;
            if (errno == EMSGSIZE) batch.mark_too_large();
            ++sent;
        }
    }
    return true;
}

std::size_t Socket::receive_messages() {
    for (std::size_t slot = 0; slot < slots; ++slot) {
        msghdr& header = messages_[slot].msg_hdr;
        header = {};
        header.msg_name = &sources_[slot].storage_;
        header.msg_namelen = sizeof sources_[slot].storage_;
        header.msg_iov = &parts_[slot];
        header.msg_iovlen = 1;
        header.msg_control = controls_[slot].bytes;
        header.msg_controllen = sizeof controls_[slot].bytes;
    }
    unsigned pending_errors = 0;
    while (true) {
        const int count = recvmmsg(fd(), messages_.data(), slots, MSG_DONTWAIT, nullptr);
        if (count >= 0) return static_cast<std::size_t>(count);
        if (is_full(errno) || errno == EINTR || !has_pending_error(pending_errors)) return 0;
    }
}

bool Socket::has_pending_error(unsigned& times) {
    refused_ = refusals_;
    return refusals_ && errno != ENOBUFS && times++ < 3;
}

bool Socket::read_refusal(Refusal& refusal) {
    if (!refusals_) return false;
    sockaddr_storage& from = refusal.from.storage_;
    struct alignas(cmsghdr) Space {
        std::byte bytes[512];
    } control;
    iovec part{.iov_base = buffer_.get(), .iov_len = slot_bytes};
    msghdr header{};
    header.msg_name = &from;
    header.msg_namelen = sizeof from;
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control.bytes;
    header.msg_controllen = sizeof control.bytes;
    const ssize_t size = recvmsg(fd(), &header, MSG_ERRQUEUE | MSG_DONTWAIT);
    if (size < 0) return false;
    refusal.quoted = {buffer_.get(), static_cast<std::size_t>(size)};
    refusal.port = false;
    for (cmsghdr* each = CMSG_FIRSTHDR(&header); each != nullptr; each = CMSG_NXTHDR(&header, each)) {
        const bool four = each->cmsg_level == IPPROTO_IP && each->cmsg_type == IP_RECVERR;
        const bool six = each->cmsg_level == IPPROTO_IPV6 && each->cmsg_type == IPV6_RECVERR;
        if (!four && !six) continue;
        sock_extended_err error{};
        std::memcpy(&error, CMSG_DATA(each), sizeof error);
        refusal.port = four ? error.ee_origin == SO_EE_ORIGIN_ICMP && error.ee_type == ICMP_UNREACH &&
                                  error.ee_code == ICMP_UNREACH_PORT
                            : error.ee_origin == SO_EE_ORIGIN_ICMP6 && error.ee_type == ICMP6_DST_UNREACH &&
                                  error.ee_code == ICMP6_DST_UNREACH_NOPORT;
    }
    return true;
}

Socket::About Socket::about(std::size_t slot) {
    About message{.segment_bytes = std::max<std::size_t>(messages_[slot].msg_len, 1)};
    msghdr& header = messages_[slot].msg_hdr;
    for (cmsghdr* control = CMSG_FIRSTHDR(&header); control != nullptr; control = CMSG_NXTHDR(&header, control)) {
        if (control->cmsg_level == SOL_UDP && control->cmsg_type == UDP_GRO) {
            int size = 0;
            std::memcpy(&size, CMSG_DATA(control), sizeof size);
            if (size > 0) message.segment_bytes = static_cast<std::size_t>(size);
        } else if (control->cmsg_level == SOL_SOCKET && control->cmsg_type == SCM_TIMESTAMPNS) {
            timespec at{};
            std::memcpy(&at, CMSG_DATA(control), sizeof at);
            message.arrived_at = at.tv_sec * second + at.tv_nsec;
        } else if (control->cmsg_level == SOL_SOCKET && control->cmsg_type == SO_RXQ_OVFL) {
            std::memcpy(&overflow_, CMSG_DATA(control), sizeof overflow_);
        }
    }
    return message;
}

}  // namespace storm
