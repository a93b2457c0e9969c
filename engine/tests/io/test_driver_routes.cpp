// NAT traversal and connection migration of drivers, over loopback: peers are not at their cards' addresses.
#include <sys/socket.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <thread>

#include "io/driver.hpp"
#include "jobs.hpp"
#include "paths/routes.hpp"
#include "sim/sim.hpp"
#include "team.hpp"

using namespace storm;
using namespace storm::check;

namespace {

// A NAT between one driver and another: it forwards datagrams in both directions, from a port of its own that it can
// change, and only from addresses to which its driver has sent something.
class Router {
public:
    Router(const Address& outside) : outside_(outside), inner_(open()), outer_(open()), thread_([this] { run(); }) {}
    ~Router() {
        over_ = true;
        thread_.join();
    }
    // Where the driver behind it sends what is meant for the other one.
    [[nodiscard]] Address inside() const { return Address("127.0.0.1", port_of(inner_)); }
    void rebind() { rebind_ = true; }
    [[nodiscard]] int bindings() const { return bindings_; }

private:
    static Descriptor open() {
        Descriptor fd(socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0));
        const Address any("127.0.0.1", 0);
        CHECK(bind(fd.get(), any.get(), any.size()) == 0);
        return fd;
    }
    static std::uint16_t port_of(const Descriptor& fd) {
        sockaddr_in at{};
        socklen_t size = sizeof at;
        getsockname(fd.get(), reinterpret_cast<sockaddr*>(&at), &size);
        return ntohs(at.sin_port);
    }
    void run() {
        std::vector<std::byte> buffer(65'536);
        sockaddr_in driver{};
        while (!over_) {
            if (rebind_.exchange(false)) {
                outer_ = open();
                ++bindings_;
            }
            bool any = false;
            socklen_t size = sizeof driver;
            ssize_t got =
                recvfrom(inner_.get(), buffer.data(), buffer.size(), 0, reinterpret_cast<sockaddr*>(&driver), &size);
            if (got > 0) {
                any = true;
                sendto(outer_.get(), buffer.data(), static_cast<std::size_t>(got), 0, outside_.get(), outside_.size());
            }
            got = recv(outer_.get(), buffer.data(), buffer.size(), 0);
            if (got > 0 && driver.sin_port != 0) {
                any = true;
                sendto(inner_.get(), buffer.data(), static_cast<std::size_t>(got), 0,
                       reinterpret_cast<const sockaddr*>(&driver), sizeof driver);
            }
            if (!any) std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }

    Address outside_;
    Descriptor inner_, outer_;
    std::atomic<bool> over_{}, rebind_{};
    std::atomic<int> bindings_{};
    std::thread thread_;
};

// Two drivers, the second behind a NAT: the first has an unused address for it.
struct Home {
    explicit Home(bool sealed) {
        for (std::uint16_t rank = 0; rank < 2; ++rank)
            team.push_back(std::make_unique<Driver>("127.0.0.1", std::uint16_t{0}, SocketConfig{}));
        const Driver nobody("127.0.0.1", 0, {});
        const Address public_one("127.0.0.1", team[0]->socket().port());
        router.emplace(public_one);
        const Address useless("127.0.0.1", nobody.socket().port());
        start(0, {public_one, useless}, sealed);
        start(1, {router->inside(), useless}, sealed);
    }
    void start(std::uint16_t rank, std::vector<Address> addresses, bool sealed) {
        CoreConfig config;
        config.rank = rank;
        config.world = 2;
        config.secrets.cookie = 0x5eed'c0de'1234'5678ULL;
        config.rate_mode = RateMode::automatic;
        config.receive_buffer = team[rank]->socket().receive_buffer();
        if (sealed) {
            config.secrets.sealed = true;
            config.secrets.links = {{.opening = {std::byte{1}}}, {.opening = {std::byte{2}}}};
            Sim::seal_as(config.secrets, rank);
        }
        team[rank]->start(config, std::move(addresses));
    }
    // Both send `bytes` to each other.
    void exchange(std::uint32_t seq, std::size_t bytes) {
        AllToAll job(2, seq, [&](auto, auto) { return bytes; });
        std::vector<std::future<void>> ranks;
        for (std::uint16_t rank = 0; rank < 2; ++rank) {
            ranks.push_back(on_thread([&, rank] {
                CHECK(wait_for(*team[rank], team[rank]->post(job.spec(rank, seq, {}))).status == Status::ok);
            }));
        }
        for (auto& rank : ranks) rank.get();
        CHECK(job.complete(0) && job.complete(1));
    }

    std::vector<std::unique_ptr<Driver>> team;
    std::optional<Router> router;
};

}  // namespace

TEST(drivers_find_a_peer_behind_a_router_and_survive_new_ports) {
    for (const bool sealed : {false, true}) {
        Home home(sealed);
        home.exchange(0, 300'000);
        CHECK_EQUAL(home.team[0]->health().counters.reroutes, 1U);
        CHECK(home.team[0]->routes().at(1).learned);
        CHECK(!home.team[1]->routes().at(0).learned);
        for (std::uint32_t round = 1; round < 4; ++round) {
            home.router->rebind();
            home.exchange(round, 300'000);
            CHECK_EQUAL(home.team[0]->health().counters.reroutes, 1U + round);
        }
    }
}

TEST(ports_that_change_in_the_midst_of_an_exchange_do_not_end_it) {
    Home home(false);
    home.exchange(0, 1'000);
    std::atomic<bool> over{};
    auto changes = on_thread([&] {
        for (int change = 0; change < 3 && !over; ++change) {
            std::this_thread::sleep_for(std::chrono::milliseconds(300));
            home.router->rebind();
        }
    });
    for (std::uint32_t round = 1; home.router->bindings() < 3; ++round) home.exchange(round, 2'000'000);
    over = true;
    changes.get();
    CHECK(home.team[0]->health().counters.reroutes >= 2);
}
