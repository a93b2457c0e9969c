#include "relay/relay_commands.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <sstream>
#include <stdexcept>
#include <system_error>

namespace storm {
namespace {

constexpr std::uint64_t max_bits_per_s = 1'000'000'000'000;
constexpr std::size_t max_queue_bytes = Relay::max_packets * Relay::max_packet_bytes;
constexpr std::size_t shown_characters = 40;  // of a bad word are quoted: it may be a trace of a million bits

// Quotes a bad word in one line of printable characters, whatever it holds.
std::string quoted(std::string_view word) {
    std::string text(word.substr(0, shown_characters));
    for (char& c : text)
        if (c < ' ' || c > '~') c = '?';
    return "'" + text + (word.size() > shown_characters ? "...'" : "'");
}

[[noreturn]] void reject(const std::string& why) { throw std::invalid_argument(why); }

std::vector<std::string_view> split(std::string_view line) {
    constexpr std::string_view blank = " \t\r\n";
    std::vector<std::string_view> words;
    for (std::size_t at = line.find_first_not_of(blank); at < line.size(); at = line.find_first_not_of(blank, at)) {
        const std::size_t end = std::min(line.find_first_of(blank, at), line.size());
        words.push_back(line.substr(at, end - at));
        at = end;
    }
    return words;
}

void check_count(const std::vector<std::string_view>& words, std::size_t count, std::string_view usage) {
    if (words.size() > count) reject("unexpected " + quoted(words[count]) + ": " + std::string(usage));
    if (words.size() < count) reject("too few words: " + std::string(usage));
}

std::uint64_t whole_number(std::string_view name, std::string_view word, std::uint64_t max) {
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc() || end != word.data() + word.size() || value > max)
        reject(std::string(name) + " must be a whole number up to " + std::to_string(max) + ", got " + quoted(word));
    return value;
}

double number(std::string_view name, std::string_view word) {
    double value = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), value);
    if (error != std::errc() || end != word.data() + word.size() || !std::isfinite(value))
        reject(std::string(name) + " must be a number, got " + quoted(word));
    return value;
}

Nanos microseconds(std::string_view name, std::string_view word) {
    const double value = number(name, word);
    constexpr double max = static_cast<double>(max_fault_delay / microsecond);
    if (value < 0.0 || value > max) reject(std::string(name) + " must lie in [0, 1 h], got " + quoted(word));
    return std::llround(value * static_cast<double>(microsecond));
}

std::uint32_t ipv4_address(std::string_view word) {
    std::uint32_t address = 0;
    const char *at = word.data(), *const end = at + word.size();
    for (int i = 0; i < 4; ++i) {
        std::uint8_t part = 0;
        if (i > 0 && (at == end || *at++ != '.')) reject("not an IPv4 address: " + quoted(word));
        const auto [next, error] = std::from_chars(at, end, part);
        if (error != std::errc()) reject("not an IPv4 address: " + quoted(word));
        address = address << 8 | part;
        at = next;
    }
    if (at != end) reject("not an IPv4 address: " + quoted(word));
    return address;
}

Direction direction(std::string_view word) {
    if (word == "up") return Direction::up;
    if (word != "down") reject("direction must be up or down, got " + quoted(word));
    return Direction::down;
}

}  // namespace

std::string RelayCommands::execute(std::string_view line, Nanos now) {
    const Words words = split(line);
    try {
        if (words.empty()) reject("empty command");
        const std::string_view verb = words.front();
        if (verb == "host") {
            host(words);
        } else if (verb == "rate") {
            rate(words, now);
        } else if (verb == "queue") {
            queue(words);
        } else if (verb == "link") {
            link(words);
        } else if (verb == "trace") {
            trace(words);
        } else if (verb == "cut") {
            cut(words);
        } else if (verb == "mtu") {
            mtu(words);
        } else if (verb == "overhead") {
            overhead(words);
        } else if (verb == "stats") {
            check_count(words, 1, "stats");
            relay_.advance(now);
            return to_json(relay_.stats());
        } else {
            reject("unknown command " + quoted(verb) +
                   ": known are host, rate, queue, link, trace, cut, mtu, overhead, stats");
        }
    } catch (const std::exception& error) {
        return std::string("error ") + error.what();
    }
    return "ok";
}

std::uint16_t RelayCommands::known_host(std::string_view word) const {
    const auto index = static_cast<std::uint16_t>(whole_number("host", word, Relay::max_hosts - 1));
    if (!relay_.has_host(index)) reject("unknown host " + quoted(word) + ": make it with the command host");
    return index;
}

std::pair<std::uint16_t, std::uint16_t> RelayCommands::known_link(const Words& words) const {
    const std::pair ends(known_host(words[1]), known_host(words[2]));
    if (ends.first == ends.second) reject("host " + quoted(words[2]) + " has no link to itself");
    return ends;
}

void RelayCommands::host(const Words& words) {
    check_count(words, 5, "host INDEX NETNS_PATH DEVICE ADDRESS");
    const auto index = static_cast<std::uint16_t>(whole_number("host", words[1], Relay::max_hosts - 1));
    if (relay_.has_host(index)) reject("host " + quoted(words[1]) + " exists already");
    const std::uint32_t address = ipv4_address(words[4]);
    if (relay_.has_address(address)) reject("another host has the address " + quoted(words[4]));
    open_host_({.host = index, .netns_path = std::string(words[2]), .device = std::string(words[3])});
    relay_.add_host(index, address);
}

void RelayCommands::rate(const Words& words, Nanos now) {
    check_count(words, 4, "rate INDEX up|down BITS_PER_S");
    const std::uint16_t index = known_host(words[1]);
    const Direction way = direction(words[2]);
    relay_.set_rate(index, way, whole_number("rate", words[3], max_bits_per_s), now);
}

void RelayCommands::queue(const Words& words) {
    check_count(words, 4, "queue INDEX up|down BYTES");
    const std::uint16_t index = known_host(words[1]);
    const Direction way = direction(words[2]);
    relay_.set_queue(index, way, whole_number("queue", words[3], max_queue_bytes));
}

void RelayCommands::link(const Words& words) {
    constexpr std::string_view usage =
        "link FROM TO [loss P] [burst B] [burst_us T] [delay_us D] [jitter_us J] [seed S]";
    if (words.size() < 3) check_count(words, 3, usage);
    const auto [from, to] = known_link(words);
    RelayLinkSettings settings = relay_.link(from, to);
    for (std::size_t i = 3; i < words.size(); i += 2) {
        const std::string_view key = words[i];
        if (key != "loss" && key != "burst" && key != "burst_us" && key != "delay_us" && key != "jitter_us" &&
            key != "seed")
            reject("unexpected " + quoted(key) + ": " + std::string(usage));
        if (i + 1 == words.size()) reject("no value for " + quoted(key));
        const std::string_view value = words[i + 1];
        if (key == "loss") settings.faults.loss = number(key, value);
        if (key == "burst") settings.faults.burst = number(key, value);
        if (key == "burst_us") settings.faults.burst_time = microseconds(key, value);
        if (key == "delay_us") settings.faults.delay = microseconds(key, value);
        if (key == "jitter_us") settings.faults.jitter = microseconds(key, value);
        if (key == "seed") settings.seed = whole_number(key, value, ~std::uint64_t{0});
    }
    relay_.set_link(from, to, std::move(settings));
}

void RelayCommands::trace(const Words& words) {
    check_count(words, 4, "trace FROM TO BITS, or - instead of BITS");
    const auto [from, to] = known_link(words);
    const std::string_view bits = words[3];
    RelayLinkSettings settings = relay_.link(from, to);
    settings.faults.trace.clear();
    if (bits != "-") {
        if (bits.find_first_not_of("01") != std::string_view::npos)
            reject("a trace is made of 0 (arrives) and 1 (lost), got " + quoted(bits));
        settings.faults.trace.reserve(bits.size());
        for (const char bit : bits) settings.faults.trace.push_back(bit == '1' ? 1 : 0);
    }
    relay_.set_link(from, to, std::move(settings));
}

void RelayCommands::cut(const Words& words) {
    if (words.size() == 4) {
        const auto [from, to] = known_link(words);
        relay_.set_link_cut(from, to, whole_number("cut", words[3], 1) == 1);
        return;
    }
    check_count(words, 3, "cut INDEX 0|1, or cut FROM TO 0|1");
    const std::uint16_t index = known_host(words[1]);
    relay_.set_cut(index, whole_number("cut", words[2], 1) == 1);
}

void RelayCommands::mtu(const Words& words) {
    check_count(words, 3, "mtu INDEX BYTES");
    const std::uint16_t index = known_host(words[1]);
    relay_.set_mtu(index, whole_number("mtu", words[2], Relay::max_packet_bytes));
}

void RelayCommands::overhead(const Words& words) {
    check_count(words, 2, "overhead BYTES");
    relay_.set_overhead(whole_number("overhead", words[1], Relay::max_overhead_bytes));
}

std::string to_json(const RelayStats& stats) {
    std::ostringstream out;
    out.precision(9);
    const auto queue_json = [&out](const char* name, const RelayQueueStats& queue) {
        out << '"' << name << "\":{\"packets\":" << queue.packets << ",\"bytes\":" << queue.bytes
            << ",\"overflowed\":" << queue.overflowed << ",\"busy_s\":" << seconds(queue.busy) << '}';
    };
    const char* comma = "";
    out << "{\"links\":[";
    for (const RelayLinkStats& link : stats.links) {
        out << comma << "{\"from\":" << link.from << ",\"to\":" << link.to << ",\"seen\":" << link.seen
            << ",\"lost\":" << link.lost << ",\"bursts\":" << link.bursts << ",\"overflowed\":" << link.overflowed
            << '}';
        comma = ",";
    }
    comma = "";
    out << "],\"hosts\":[";
    for (const RelayHostStats& host : stats.hosts) {
        out << comma << "{\"host\":" << host.host << ',';
        queue_json("up", host.up);
        out << ',';
        queue_json("down", host.down);
        out << '}';
        comma = ",";
    }
    const double delivered = static_cast<double>(std::max<std::uint64_t>(stats.delivered, 1));
    out << "],\"cut\":" << stats.cut << ",\"too_large\":" << stats.too_large << ",\"strays\":" << stats.strays
        << ",\"refused\":" << stats.refused << ",\"delivered\":" << stats.delivered
        << ",\"late_mean_us\":" << static_cast<double>(stats.late_total) / delivered / static_cast<double>(microsecond)
        << ",\"late_max_us\":" << static_cast<double>(stats.late_max) / static_cast<double>(microsecond) << '}';
    return out.str();
}

}  // namespace storm
