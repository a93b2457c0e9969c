// Commands to the relay: what each sets, and the error that each mistake gives.
#include <stdexcept>
#include <string>

#include "check.hpp"
#include "relay/relay_commands.hpp"
#include "relay_network.hpp"

using namespace storm;
using namespace storm::check;

namespace {

bool starts_with_error_about(const std::string& answer, const std::string& word) {
    return answer.starts_with("error ") && answer.find(word) != std::string::npos &&
           answer.find('\n') == std::string::npos;
}

}  // namespace

TEST(a_bad_command_names_the_bad_word_and_changes_nothing) {
    Network net;
    net.tell("link 0 1 loss 0.25 burst 2 delay_us 7 jitter_us 3 seed 9");
    const struct {
        const char *line, *word;
    } cases[] = {
        {"", "empty"},
        {" \t\r", "empty"},
        {"frobnicate 1", "'frobnicate'"},
        {"stats now", "'now'"},
        {"rate 0 up", "too few"},
        {"rate 0 up 5 6", "'6'"},
        {"rate 9 up 5", "'9'"},
        {"rate 256 up 5", "'256'"},
        {"rate -1 up 5", "'-1'"},
        {"rate 0 sideways 5", "'sideways'"},
        {"rate 0 up 5mbit", "'5mbit'"},
        {"rate 0 up 1000000000001", "'1000000000001'"},
        {"rate 0 up 99999999999999999999999", "'99999999999999999999999'"},
        {"queue 0 down 1.5", "'1.5'"},
        {"link 0", "too few"},
        {"link 0 0 loss 0.1", "'0'"},
        {"link 0 7", "'7'"},
        {"link 0 1 loss", "'loss'"},
        {"link 0 1 los 0.1", "'los'"},
        {"link 0 1 delay_us 1 loss 1.5", "loss"},
        {"link 0 1 loss nan", "'nan'"},
        {"link 0 1 delay_us -1", "'-1'"},
        {"link 0 1 delay_us 1e99", "'1e99'"},
        {"link 0 1 jitter_us x", "'x'"},
        {"link 0 1 burst 0.5", "burst"},
        {"link 0 1 burst_us 5000", "burst"},  // beside bursts of 2
        {"link 0 1 burst 1 burst_us -1", "'-1'"},
        {"link 0 1 burst 1 burst_us nan", "'nan'"},
        {"link 0 1 loss 1 burst 1 burst_us 5000", "burst_time"},
        {"link 0 1 loss 0.9", "burst"},  // too much for bursts of 2
        {"link 0 1 seed -2", "'-2'"},
        {"trace 0 1 0120", "'0120'"},
        {"trace 0 1", "too few"},
        {"cut 0 2", "'2'"},
        {"cut 0 1 2", "'2'"},
        {"cut 0 0 1", "'0'"},
        {"cut 0 7 1", "'7'"},
        {"mtu 0 100000", "'100000'"},
        {"mtu 0", "too few"},
        {"overhead 5000", "'5000'"},
        {"host 0 /ns st 198.18.0.9", "'0'"},
        {"host 300 /ns st 198.18.0.9", "'300'"},
        {"host 5 /ns st 198.18.0.1", "'198.18.0.1'"},
        {"host 5 /ns st 198.18.0", "'198.18.0'"},
        {"host 5 /ns st 198.18.0.256", "'198.18.0.256'"},
        {"host 5 /ns st 198.18.0.1.2", "'198.18.0.1.2'"},
        {"host 5 /missing st 198.18.0.9", "/missing"},
        {"\x01", "'?'"},
    };
    const std::string before = net.ask("stats");
    for (const auto& [line, word] : cases) {
        const std::string answer = net.ask(line);
        if (!starts_with_error_about(answer, word)) throw std::runtime_error(std::string(line) + " gave: " + answer);
    }
    CHECK(starts_with_error_about(net.ask("trace 0 1 2" + std::string(100'000, '0')), "..."));
    CHECK(net.ask("trace 0 1 2" + std::string(100'000, '0')).size() < 200);
    CHECK(net.ask("stats") == before);
    const RelayLinkSettings& link = net.relay.link(0, 1);
    CHECK_EQUAL(link.faults.loss, 0.25);
    CHECK_EQUAL(link.faults.burst, 2.0);
    CHECK_EQUAL(link.faults.burst_time, 0);
    CHECK_EQUAL(link.faults.delay, 7 * microsecond);
    CHECK_EQUAL(link.faults.jitter, 3 * microsecond);
    CHECK_EQUAL(link.seed, 9U);
    CHECK(!net.relay.has_host(5));
    CHECK_EQUAL(net.opened.size(), 4U);
}

TEST(a_link_keeps_what_is_not_named) {
    Network net;
    net.tell("link 2 3 loss 0.5 burst_us 2.5 delay_us 100");
    net.tell("  link\t2 3   seed 18446744073709551615 ");
    net.tell("link 2 3");
    net.tell("link 2 3 loss 0");
    const RelayLinkSettings& link = net.relay.link(2, 3);
    CHECK_EQUAL(link.faults.loss, 0.0);
    CHECK_EQUAL(link.faults.burst_time, 2500);
    CHECK_EQUAL(link.faults.delay, 100 * microsecond);
    CHECK_EQUAL(link.seed, ~std::uint64_t{0});
}

TEST(statistics_are_one_line_of_json) {
    Network net(2);
    net.tell("rate 0 up 12000000");
    net.send(0, 1);
    net.send_bytes(0, {});
    net.run_until(second);
    CHECK(net.opened[1].device == "st1");
    CHECK(net.ask("stats") ==
          "{\"links\":[{\"from\":0,\"to\":1,\"seen\":1,\"lost\":0,\"bursts\":0,\"overflowed\":0},"
          "{\"from\":1,\"to\":0,\"seen\":0,\"lost\":0,\"bursts\":0,\"overflowed\":0}],"
          "\"hosts\":[{\"host\":0,\"up\":{\"packets\":1,\"bytes\":1486,\"overflowed\":0,\"busy_s\":0.001},"
          "\"down\":{\"packets\":0,\"bytes\":0,\"overflowed\":0,\"busy_s\":0}},"
          "{\"host\":1,\"up\":{\"packets\":0,\"bytes\":0,\"overflowed\":0,\"busy_s\":0},"
          "\"down\":{\"packets\":1,\"bytes\":1486,\"overflowed\":0,\"busy_s\":0}}],"
          "\"cut\":0,\"too_large\":0,\"strays\":1,\"refused\":0,\"delivered\":1,\"late_mean_us\":0,\"late_max_us\":0}");
}
