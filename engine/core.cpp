// How exchanges begin, and what a core knows; arrivals.cpp, departures.cpp and endings.cpp hold the rest of Core.
#include "core.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>

#include "peer.hpp"

namespace storm {

std::size_t Core::chunk_bytes_for(std::size_t datagram_bytes, bool sealed) {
    const std::size_t overhead = header_bytes + (sealed ? tag_bytes : 0);
    return datagram_bytes > overhead ? (datagram_bytes - overhead) / 16 * 16 : 0;
}

Core::Core(CoreConfig config, Nanos now)
    : config_(std::move(config)),
      chunk_bytes_(chunk_bytes_for(config_.datagram_bytes, config_.secrets.sealed)),
      seal_(config_.secrets, config_.rank),
      blocks_(chunk_bytes_, 64 << 20),
      pool_(config_.pool_bytes, config_.world > 1 ? config_.world - 1U : 1U),
      line_(now) {
    if (config_.world == 0 || config_.rank >= config_.world) throw std::invalid_argument("rank must be below world");
    if (config_.datagram_bytes < 128 || config_.datagram_bytes > max_datagram_bytes) {
        throw std::invalid_argument("datagram_bytes must lie in [128, 65507], got " +
                                    std::to_string(config_.datagram_bytes));
    }
    // So that a report with one word fits.
    if (config_.least_path_bytes < header_bytes + tag_bytes + Report::fixed_bytes + 8)
        throw std::invalid_argument("least_path_bytes must be at least 88");
    if (config_.rate_mode == RateMode::fixed) {
        if (!(config_.bytes_per_s > 0)) throw std::invalid_argument("rate must be above 0 bytes per second");
        // Two milliseconds' worth may leave at once, or two datagrams if that is more.
        const double burst = std::max(config_.bytes_per_s * 0.002, 2.0 * static_cast<double>(config_.datagram_bytes));
        shared_pacer_.emplace(config_.bytes_per_s, burst, now);
    }
    for (std::uint16_t rank = 0; rank < config_.world; ++rank) {
        peers_.push_back(rank == config_.rank ? nullptr : make_peer(rank, now));
    }
    turn_ = (config_.rank + 1U) % config_.world;
}

Core::~Core() = default;

std::unique_ptr<Core::Peer> Core::make_peer(std::uint16_t rank, Nanos now) const {
    const std::size_t overhead = header_bytes + seal_.overhead_bytes();
    const PathMtu path(std::max(config_.least_path_bytes, PieceCut::least_datagram(chunk_bytes_, overhead)),
                       config_.datagram_bytes);
    return std::make_unique<Peer>(rank, credit_bytes(nullptr), make_rate(now), path, chunk_bytes_, now);
}

RateControl Core::make_rate(Nanos now) const {
    return {config_.rate_mode, config_.datagram_bytes, now, config_.world - 1U};
}

void Core::validate(const ExchangeSpec& spec) const {
    std::vector<std::uint8_t> seen(config_.world);
    const auto check = [&](std::uint16_t peer, std::uint64_t bytes, std::uint8_t once) {
        if (peer >= config_.world || peer == config_.rank)
            throw std::invalid_argument("a peer must be another rank of the world");
        if (bytes > std::numeric_limits<std::uint32_t>::max())
            throw std::invalid_argument("a message is limited to 4 GiB");
        if ((seen[peer] & once) != 0) throw std::invalid_argument("two messages of one peer and stage");
        seen[peer] = static_cast<std::uint8_t>(seen[peer] | once);
    };
    for (const SendSpec& send : spec.sends) {
        check(send.peer, send.bytes, send.second_stage ? 2 : 1);
        if (send.second_stage && (!spec.reduction || spec.reduction->bytes != send.bytes)) {
            throw std::invalid_argument("the second stage sends the result of the reduction");
        }
    }
    for (const ReceiveSpec& receive : spec.receives) {
        check(receive.peer, receive.bytes, receive.second_stage ? 8 : 4);
        if (receive.reduce && (!spec.reduction || spec.reduction->bytes != receive.bytes || receive.second_stage)) {
            throw std::invalid_argument(
                "a contribution must belong to the first stage and have the size of the reduction");
        }
    }
    if (spec.reduction) {
        const ReductionSpec& reduction = *spec.reduction;
        if (reduction.out_dtype != reduction.wire && reduction.out_dtype != Dtype::float32)
            throw std::invalid_argument("a reduction is written as what was sent or as float32");
        if (reduction.wire == Dtype::bytes && reduction.mode != Reduce::copy)
            throw std::invalid_argument("plain bytes cannot be added up");
        if (reduction.wire == Dtype::int8 && reduction.mode == Reduce::in_order)
            throw std::invalid_argument("int8 has no sum in rank order");
        const auto contributors =
            std::count_if(spec.receives.begin(), spec.receives.end(), [](const ReceiveSpec& r) { return r.reduce; });
        if (reduction.own_position > static_cast<std::size_t>(contributors))
            throw std::invalid_argument("our own position lies behind all contributors");
    }
    for (const StageSpec& stage : spec.stages) {
        if (!(stage.budget >= 0.0 && stage.budget <= 1.0)) throw std::invalid_argument("budget must lie in [0, 1]");
    }
    if (spec.reduction && spec.reduction->mode == Reduce::copy) {
        // What we pass on cannot be more complete than what we got.
        const auto& [first, second_one] = spec.stages;
        if (second_one.budget < first.budget || (second_one.deadline == never && first.deadline != never)) {
            throw std::invalid_argument("what is passed on may lose no less than what comes in");
        }
    }
}

std::uint64_t Core::post(const ExchangeSpec& spec, Nanos now) {
    validate(spec);
    if (is_over(spec.channel, spec.seq) || find(spec.channel, spec.seq) != nullptr) {
        throw std::invalid_argument("this sequence number of the channel was posted before");
    }
    Posted& posted = posted_[spec.channel];
    if (spec.seq > posted.next && spec.seq - posted.next + posted.skipped.size() > Posted::most_skipped) {
        throw std::invalid_argument("too many sequence numbers of the channel were passed over");
    }
    posted.skipped.erase(spec.seq);
    for (; posted.next <= spec.seq; ++posted.next) {
        if (posted.next != spec.seq) posted.skipped.insert(static_cast<std::uint32_t>(posted.next));
    }

    auto owned = std::make_unique<Exchange>(spec, chunk_bytes_, blocks_, now);
    Exchange& exchange = *owned;
    exchange.id = next_id_++;
    key_of_[exchange.id] = exchange_key(spec.channel, spec.seq);
    active_[exchange_key(spec.channel, spec.seq)] = std::move(owned);

    for (Outgoing& message : exchange.sends) {
        if (free_slots_.empty()) {
            free_slots_.push_back(static_cast<std::uint32_t>(slots_.size()));
            slots_.push_back({});
        }
        message.slot = free_slots_.back();
        free_slots_.pop_back();
        slots_[message.slot].message = &message;
        message.generation = slots_[message.slot].generation;
        Peer& peer = *peers_[message.peer];
        if (peer.silent) control(peer, {.kind = Kind::ping});  // it heals when it answers
        if (peer.left && !exchange.lossy(message.second_stage)) {
            fail(exchange, Status::peer_left, peer.rank, message.cut.bytes, peer.left_for);
        } else if (peer.left || (peer.silent && exchange.lossy(message.second_stage))) {
            release(message);
        } else {
            enqueue(message);
        }
    }
    if (now >= share_at_) share_line(now);
    for (Incoming& message : exchange.receives) {
        Peer& peer = *peers_[message.peer];
        if (peer.open_receives++ == 0) ++waited_for_;
        if (peer.silent) control(peer, {.kind = Kind::ping});
    }

    for (Pool::Entry& entry : pool_.take(spec.channel, spec.seq)) {
        Peer& peer = *peers_[entry.header.source];
        if (entry.header.kind == Kind::end) {
            take_end(exchange, peer, (entry.header.flags & flag_second_stage) != 0, now);
        } else if (entry.header.kind == Kind::ready) {
            obey(exchange, peer, entry.header);
        } else if (entry.header.kind == Kind::failed) {
            // It was found good before it was kept.
            abandon_peer(exchange, peer, Status::peer_failed, *parse_blame(entry.header, config_.world));
        } else {
            deliver(exchange, peer, entry.header, {entry.payload.get(), entry.bytes}, now);
        }
    }
    counters_.pool_bytes = pool_.bytes();

    for (Incoming& message : exchange.receives) {
        if (message.closed) continue;
        Peer& peer = *peers_[message.peer];
        const bool lossy = exchange.lossy(message.second_stage);
        if (peer.left && !lossy) {
            fail(exchange, Status::peer_left, peer.rank, message.cut.bytes - message.arrived_bytes, peer.left_for);
        } else if (peer.left || (peer.silent && lossy)) {
            close(exchange, message, false);
        } else {
            message.ask_every =
                std::min({std::max(8 * peer.out.patience(), 100 * millisecond), longest_ask, config_.silence / 16});
            message.ask_at = now + message.ask_every;
            if (message.cut.bytes > config_.eager_bytes || peer.refused) {
                control(peer, {.kind = Kind::ready, .channel = spec.channel, .seq = spec.seq});
            }
        }
    }
    open_gates(exchange);
    const std::uint64_t id = exchange.id;
    finish_if_done(exchange, now);
    return id;
}

void Core::cancel(std::uint64_t id, Nanos now) {
    const auto key = key_of_.find(id);
    if (key != key_of_.end()) finish(*active_.at(key->second), Status::closed, now);
}

void Core::leave() {
    for (auto& peer : peers_) {
        if (peer && !peer->left) control(*peer, {.kind = Kind::bye, .blame = lost_});
    }
}

bool Core::gone() const {
    // Nobody waits for an answer of one that others call silent, unless it has spoken to us since.
    const auto lost = [&](const Peer& peer) {
        return lost_ == Blame{peer.rank, Status::peer_silent} && peer.last_heard <= lost_at_;
    };
    return std::all_of(peers_.begin(), peers_.end(), [&](const auto& peer) {
        return !peer || peer->left || peer->told || peer->silent || lost(*peer);
    });
}

Exchange* Core::find(std::uint32_t channel, std::uint32_t seq) {
    const auto found = active_.find(exchange_key(channel, seq));
    return found == active_.end() ? nullptr : found->second.get();
}

bool Core::is_over(std::uint32_t channel, std::uint32_t seq) const {
    const auto posted = posted_.find(channel);
    return posted != posted_.end() && seq < posted->second.next && !posted->second.skipped.contains(seq);
}

std::optional<Core::Finished> Core::take_finished() {
    if (finished_.empty()) return std::nullopt;
    Finished first = std::move(finished_.front());
    finished_.pop_front();
    return first;
}

Nanos Core::round_trip(std::uint16_t peer) const { return peers_.at(peer) ? peers_[peer]->out.smooth_rtt() : 0; }

double Core::loss_from(std::uint16_t peer) const {
    if (!peers_.at(peer) || peers_[peer]->in.largest() == 0) return 0.0;
    const Inbound& in = peers_[peer]->in;
    return 1.0 - static_cast<double>(in.arrived()) / static_cast<double>(in.largest());
}

double Core::rate_to(std::uint16_t peer) const { return peers_.at(peer) ? peers_[peer]->rate.bytes_per_s() : 0.0; }

std::size_t Core::path_bytes(std::uint16_t peer) const {
    return peers_.at(peer) ? peers_[peer]->path.bytes() : config_.datagram_bytes;
}

std::uint64_t Core::credit_bytes(const Peer* peer) const {
    if (config_.world < 2) return config_.receive_buffer;
    // Half of the socket's buffer is divided among all, a quarter among those that we wait for: as they finish one after
    // the other the last ones get more, and a quarter is left for what was granted to those before.
    const std::size_t quarter = config_.receive_buffer / 4, others = config_.world - 1U;
    const bool waited_for = peer != nullptr && peer->open_receives > 0;
    return 2 * quarter / others + quarter / (waited_for ? waited_for_ : others);
}

}  // namespace storm
