// Delivery rate of a link, from the acknowledgement reports of its receiver.
#pragma once

#include <cstdint>

#include "base/clock.hpp"
#include "link/packet_train.hpp"

namespace storm {

// What a report says about the link.
struct Delivery {
    Nanos now{};
    Nanos rtt{};                      // round trip of the newest packet it names, minus the time the receiver held it
    double bytes_per_s{};             // delivery rate over the packet's flight (DeliveryMeter); 0 when unknown
    std::uint64_t delivered_bytes{};  // newly delivered
    std::uint64_t lost_bytes{};       // newly declared lost
    std::uint64_t in_flight_bytes{};  // after this report
    bool app_limited{};               // the sender had nothing more to send when that packet left
    double burst{1};                  // datagrams lost in a row, on average (Outbound)
    Dispersion train{};               // what the datagrams after a pause show (PacketTrain)
    double bottleneck_bytes_per_s{};  // most that the endpoint delivered over all links (BottleneckMeter); 0 if unknown
};

// State of the link at the moment a packet left; the link keeps it with the packet number.
struct SendStamp {
    std::uint64_t delivered_bytes{};  // the link's total then
    Nanos delivered_at{};             // when that total was reached
    Nanos first_sent_at{};            // when the packet that total ends with was sent
    Nanos sent_at{};
    bool app_limited{};
};

// Delivery rate of a flight, as in BBR's draft: reports are counted from the last one before the packet left, and the
// slower of sending and arriving counts. Measuring from the packet's own departure instead would count a whole report
// quantum too much, several times the rate on short links.
class DeliveryMeter {
public:
    [[nodiscard]] SendStamp on_send(std::uint64_t in_flight_bytes_before, Nanos now);
    // Nothing is left to send: packets are marked as app-limited until what is in flight now has been delivered.
    void on_app_limited(std::uint64_t in_flight_bytes) { limited_until_ = delivered_ + in_flight_bytes; }
    // `newest` belongs to the newest packet the report names, `held` is the time the receiver kept that packet before
    // it reported. Returns bytes per second, 0 when the interval is too short to tell.
    [[nodiscard]] double on_report(const SendStamp& newest, std::uint64_t newly_delivered_bytes, Nanos held, Nanos now);

private:
    std::uint64_t delivered_{}, limited_until_{};
    Nanos delivered_at_{}, first_sent_at_{};
};

// The most that all links of an endpoint deliver together: the rate of its bottleneck, possibly that of some seconds
// ago.
class BottleneckMeter {
public:
    explicit BottleneckMeter(Nanos now) : since_(now) {}
    double on_report(std::uint64_t delivered_bytes, Nanos now);

private:
    Nanos since_;
    std::uint64_t bytes_{};
    double best_{};
};

}  // namespace storm
