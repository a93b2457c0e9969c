// Membership of an endpoint: delivers and sends view messages, and applies a new view by dropping peers from exchanges.
#include <algorithm>
#include <utility>
#include <vector>

#include "base/ranks.hpp"
#include "core/core.hpp"
#include "peers/peer.hpp"

namespace storm {

// Created when first needed: a job without views sends no view messages and pays nothing.
Views& Core::views(Nanos now) {
    if (views_) return *views_;
    ViewsConfig config;
    config.self = member(config_.rank);
    config.capacity = config_.world;
    config.silence = config_.silence;
    config.seed = config_.secrets.cookie + config_.rank;
    // A process that is not the first of its rank, or that joined late, does not know the members.
    const bool first = seal_.incarnation(config_.rank) == 0 && !config_.late;
    for (std::uint16_t rank = 0; first && rank < config_.world; ++rank) {
        if (!is_vacant(rank)) config.members.push_back({rank, 0});
    }
    views_.emplace(config, now);
    for (std::uint16_t rank = 0; rank < config_.world; ++rank) {
        const Peer* peer = peers_.find(rank);
        if (peer == nullptr || is_vacant(rank)) continue;
        if (seal_.incarnation(rank) != 0) views_->readmitted(member(rank), now);
        if (peer->left()) views_->on_goodbye(rank, now);
    }
    on_views_changed(now);
    return *views_;
}

Member Core::member(std::uint16_t rank) const { return {rank, seal_.incarnation(rank)}; }

bool Core::is_vacant(std::uint16_t rank) const {
    return std::find(config_.vacant.begin(), config_.vacant.end(), rank) != config_.vacant.end();
}

// Applies what the last call on the views has changed.
void Core::on_views_changed(Nanos now) {
    while (std::optional<OutgoingViewMessage> message = views_->take_view_message()) {
        const Peer* peer = message->to < config_.world ? peers_.find(message->to) : nullptr;
        if (peer != nullptr && !peer->left()) peers_[message->to].queue_view_message(std::move(message->body));
    }
    inside_ = views_->inside();
    const View* view = views_->view();
    if (view != nullptr && view->number != view_number()) apply_view(*view, now);
}

void Core::follow(const View& view, bool inside, Nanos now) {
    inside_ = inside;
    if (view.number != view_number()) apply_view(view, now);
}

void Core::apply_view(const View& view, Nanos now) {
    // A process that was absent, even for one view, has aborted the exchanges of the views before. A process that was
    // not absent knows every view, as it took part in deciding the next one.
    member_since_.resize(config_.world);
    for (const Member who : view.members) {
        if (view_ && (view.has_joined(who) || member_incarnation_[who.rank] != who.incarnation))
            member_since_[who.rank] = view.number;
    }
    member_incarnation_.assign(config_.world, -1);
    for (const Member who : view.members) member_incarnation_[who.rank] = who.incarnation;
    view_ = view;
    exchanges_.each([&](Exchange& exchange) {
        drop_non_members(exchange);
        settle(exchange, now);
    });
}

// Once a view later than the exchange's is known, drops the peers of the exchange that are not in it.
void Core::drop_non_members(Exchange& exchange) {
    if (!exchange.waits_across_views() || exchange.view >= view_number()) return;
    const auto takes_part = [&](std::uint16_t rank) {
        const Member who = member(rank);
        // If this process itself is outside, the others go on without it.
        return inside_ && member_since_[rank] <= exchange.view && member_since_[config_.rank] <= exchange.view &&
               (view_->has(who) || view_->is_leaving(who));
    };
    // Also if its own messages are complete: others may miss its contributions, and so have less to forward.
    for (const Outgoing& message : exchange.sends) {
        if (!takes_part(message.peer)) drop_peer(exchange, message.peer);
    }
    for (const Incoming& message : exchange.receives) {
        if (!takes_part(message.peer)) drop_peer(exchange, message.peer);
    }
}

void Core::drop_peer(Exchange& exchange, std::uint16_t peer) {
    exchange.dropped = true;
    for (Outgoing& message : exchange.sends) {
        if (message.peer != peer || message.released) continue;
        message.release();
        peers_[peer].queue.remove(message);
    }
    for (Incoming& message : exchange.receives) {
        if (message.peer == peer) close(exchange, message, false);
    }
}

std::vector<std::uint16_t> Core::unreachable_peers(std::uint64_t id, Nanos now) const {
    std::vector<std::uint16_t> all;
    const Exchange* exchange = exchanges_.find(id);
    if (exchange == nullptr || !exchange->waits_across_views()) return all;
    const Nanos started = exchange->outcome.started;
    const auto look = [&](std::uint16_t rank) {
        const Peer* peer = peers_.find(rank);
        if (peer == nullptr || std::find(all.begin(), all.end(), rank) != all.end()) return;
        if (peer->left() || now >= peer->silent_at(started, config_.silence) ||
            now >= peer->blocked_at(started, config_.silence))
            all.push_back(rank);
    };
    for (const Outgoing& message : exchange->sends) {
        if (message.wanted) look(message.peer);
    }
    for (const Incoming& message : exchange->receives) {
        if (!message.closed) look(message.peer);
    }
    return all;
}

CanComplete Core::can_complete(std::uint64_t id, Nanos now) const {
    const Exchange* exchange = exchanges_.find(id);
    if (exchange == nullptr) return CanComplete::good;
    CanComplete worst = CanComplete::good;
    const auto look = [&](std::uint16_t rank) {
        const Peer& peer = peers_.look(rank);
        const Nanos started = exchange->outcome.started;
        if (peer.left() || now >= peer.silent_at(started, config_.silence) ||
            now >= peer.blocked_at(started, config_.silence) || exchange->aborted_by.has(rank)) {
            worst = CanComplete::none;
        } else if (!exchange->posted_by.has(rank)) {
            worst = std::max(worst, CanComplete::unclear);
        }
    };
    for (const Outgoing& message : exchange->sends) {
        if (!message.released) look(message.peer);
    }
    for (const Incoming& message : exchange->receives) {
        if (!message.closed) look(message.peer);
    }
    return worst;
}

void Core::refused(std::uint16_t rank, std::span<const std::byte> quoted, Nanos now) {
    // Only a sender that saw our datagram can quote it.
    const std::optional<Header> header = parse_header(quoted);
    if (!header || header->cookie != seal_.visible_cookie() || header->source % config_.world != config_.rank) return;
    const Peer* peer = rank < config_.world ? peers_.find(rank) : nullptr;
    if (peer == nullptr || peer->vacant || peer->left() || !peers_[rank].on_unreachable(now)) return;
    if (views_ && config_.lane == 0) {
        views_->refused(rank, now);
        on_views_changed(now);
    }
    for (const auto& [key, exchange] : exchanges_.active()) {
        const auto set_earlier = [&](const auto& message) {
            if (message.peer != rank) return;
            exchanges_.set_earlier(*exchange, exchange->timer_of(message), due_at_.of(*exchange, message));
        };
        std::for_each(exchange->sends.begin(), exchange->sends.end(), set_earlier);
        std::for_each(exchange->receives.begin(), exchange->receives.end(), set_earlier);
    }
}

void Core::mark_posted(Exchange& exchange, const Peer& peer) {
    if (exchange.waits_across_views() && peer.rank < Ranks::bits) exchange.posted_by.add(peer.rank);
}

void Core::take_view_message(Peer& peer, std::span<const std::byte> body, Nanos now) {
    if (config_.world > Ranks::bits || config_.lane != 0)
        return;  // the world exceeds the slots of a view, or lane 0 has the views
    views(now).receive(peer.rank, body, now);
    on_views_changed(now);
}

}  // namespace storm
