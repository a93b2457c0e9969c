// The only system calls on the data path: one UDP socket, many datagrams per call.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "base/clock.hpp"
#include "base/descriptor.hpp"
#include "exchange/batch.hpp"
#include "paths/address.hpp"

namespace storm {

struct SocketConfig {
    std::size_t receive_buffer{4 << 20};
    bool own_interface{};     // sends over the interface of its address, wherever other routes lead
    bool low_priority{};      // marks datagrams with DSCP LE (RFC 8622)
    bool segmentation{true};  // UDP_SEGMENT, where the kernel has it
    bool coalescing{true};    // UDP_GRO, where the kernel has it
    bool refusals{true};      // reports ports at which no process listens: see `read_refusals`
};

class Socket {
public:
    // Binds; port 0 chooses one. Throws std::system_error.
    Socket(const Address& address, const SocketConfig& config);
    Socket(const Socket&) = delete;
    Socket& operator=(const Socket&) = delete;

    // Rebinds to another address, behind the same descriptor; unread datagrams are lost. Throws std::system_error.
    void rebind(const Address& address, const SocketConfig& config);
    // Frees the descriptor and the port; nothing else may be called after it.
    void close() { fd_.close(); }

    // Sends batches in order to the addresses of their peers, by rank, and returns how many were sent; fewer than given
    // when the socket's buffer is full. Batches that the network refuses (no route, no such port) count as sent, and
    // then as lost.
    [[nodiscard]] std::size_t send(std::span<Batch* const> batches, std::span<const Address> peers);
    // Sends one batch to an address; false if the socket's buffer is full.
    bool send_to(const Address& to, Batch& batch);
    struct Read {
        std::size_t datagrams{};
        bool more{};  // others may wait: the system call returned as many as it can
    };
    // Calls `take(datagram, arrived_at, from)` with each datagram that waits, up to one system call's worth.
    // `arrived_at` is the kernel's time stamp, by CLOCK_REALTIME; 0 where there is none.
    template <class Take>
    Read receive(Take&& take);

    // Calls `take(address, quoted)` with each address at which no process listens, as its kernel reported (ICMP port
    // unreachable) in answer to a datagram of ours that begins as quoted. Such messages can be forged.
    template <class Take>
    void read_refusals(Take&& take);
    // True if a call has returned an error that may be one of these.
    [[nodiscard]] bool refused() const { return refused_; }

    [[nodiscard]] int fd() const { return fd_.get(); }
    [[nodiscard]] int family() const { return family_; }
    [[nodiscard]] std::uint16_t port() const;
    [[nodiscard]] std::size_t receive_buffer() const { return receive_buffer_; }  // as the kernel granted it
    [[nodiscard]] bool segments() const { return segmentation_; }
    [[nodiscard]] bool coalesces() const { return coalescing_; }
    [[nodiscard]] std::uint32_t overflow() const { return overflow_; }  // datagrams that a full buffer dropped

private:
    static constexpr std::size_t slots =
        8;  // messages per receive call: few, so that they are still in the cache when read
    static constexpr std::size_t slot_bytes = 65'536;

    [[nodiscard]] std::size_t receive_messages();
    struct Refusal {
        Address from;
        std::span<const std::byte> quoted;
        bool port{};  // no process listens there; other errors of datagrams are of no use
    };
    // False when there is none.
    [[nodiscard]] bool read_refusal(Refusal& refusal);
    // The kernel reports an error of an earlier datagram to the next call, which does nothing else. True if that call
    // must be repeated.
    [[nodiscard]] bool has_pending_error(unsigned& times);
    // The kernel's ancillary data of a message: when it arrived, and the segment size if it coalesced datagrams; the
    // whole length if it did not.
    struct About {
        std::size_t segment_bytes{};
        Nanos arrived_at{};
    };
    [[nodiscard]] About about(std::size_t slot);

    Descriptor fd_;
    int family_;
    bool segmentation_{}, coalescing_{}, refusals_{}, refused_{};
    std::size_t receive_buffer_{};
    std::uint32_t overflow_{};
    std::unique_ptr<std::byte[]> buffer_;
    std::array<mmsghdr, slots> messages_{};
    std::array<iovec, slots> parts_{};
    std::array<Address, slots> sources_{};
    struct alignas(cmsghdr) ControlSpace {
        std::byte bytes[CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(std::uint32_t)) + CMSG_SPACE(sizeof(timespec))];
    };
    std::array<ControlSpace, slots> controls_{};
};

template <class Take>
Socket::Read Socket::receive(Take&& take) {
    const std::size_t count = receive_messages();
    std::size_t datagrams = 0;
    for (std::size_t slot = 0; slot < count; ++slot) {
        std::span<std::byte> rest(buffer_.get() + slot * slot_bytes, messages_[slot].msg_len);
        const About message = about(slot);
        do {
            const std::size_t size = std::min(message.segment_bytes, rest.size());
            take(rest.first(size), message.arrived_at, sources_[slot]);
            rest = rest.subspan(size);
            ++datagrams;
        } while (!rest.empty());
    }
    return {.datagrams = datagrams, .more = count == slots};
}

template <class Take>
void Socket::read_refusals(Take&& take) {
    refused_ = false;
    Refusal refusal;
    for (int most = 64; most > 0 && read_refusal(refusal); --most) {
        if (refusal.port) take(refusal.from, refusal.quoted);
    }
}

}  // namespace storm
