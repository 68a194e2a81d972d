//! A service behind `hapax consume`: it verifies signatures, checks ids, and answers as a test says.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::future::pending;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use hapax_webhooks::WebhookLayer;
use rustix::process::{Pid, Signal, kill_process};
use tokio::net::TcpSocket;
use tokio::sync::Semaphore;
use tokio::time::Instant;

/// `whsec_` and the base64 of 24 bytes.
pub(super) const SECRET: &str = concat!("whsec", "_MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3");

/// An answer to one request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reply {
    /// A status with `Retry-After`, without an effect.
    Status(u16, &'static str),
    /// A status without an effect, each time until the test has other replies.
    Rejected(u16),
    /// An effect, and no answer.
    Late,
    /// Neither an effect nor an answer.
    Silent,
    /// An effect and an answer, once the test allows it.
    Held,
}

/// The moment of a request at which its sender is killed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Moment {
    /// Before the effect.
    Arrived,
    /// After the effect, without an answer.
    Accepted,
    /// Some time after the answer: before or after the record, or the acknowledgement.
    Answered(Duration),
    /// When an answer other than 2xx was sent.
    Failed,
}

#[derive(Clone, Copy, Debug)]
struct Kill {
    sender: Pid,
    moment: Moment,
    /// Effects before it.
    after: u32,
}

/// A request.
#[derive(Clone, Debug)]
pub(super) struct Received {
    pub(super) id: String,
    pub(super) at: Instant,
    pub(super) headers: HeaderMap,
}

#[derive(Default)]
struct State {
    received: Vec<Received>,
    /// Order key and id of each effect.
    effects: Vec<(String, String)>,
    accepted: BTreeSet<String>,
    replies: HashMap<String, VecDeque<Reply>>,
    /// Number of replies of each kind.
    given: BTreeMap<String, u32>,
    kill: Option<Kill>,
    kills: u32,
}

/// The service. It has an effect for each id that it accepts for the first time.
#[derive(Clone)]
pub(super) struct Service(Arc<Mutex<State>>, Arc<Semaphore>);

impl Default for Service {
    fn default() -> Self {
        Self(Arc::default(), Arc::new(Semaphore::new(0)))
    }
}

impl Service {
    /// Binds an address, which rejects connections until [`serve`](Self::serve).
    pub(super) fn bind() -> (TcpSocket, SocketAddr) {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = socket.local_addr().unwrap();
        (socket, address)
    }

    /// Serves signed messages.
    pub(super) fn serve(&self, socket: TcpSocket) {
        let layer = WebhookLayer::standard("consume").secret(SECRET).build().unwrap();
        let (this, listener) = (self.clone(), socket.listen(1024).unwrap());
        let handle = move |headers: HeaderMap| async move { this.handle(headers).await };
        let router = Router::new().fallback(handle).layer(layer);
        tokio::spawn(async move { axum::serve(listener, router).await });
    }

    pub(super) fn reply(&self, id: &str, replies: &[Reply]) {
        self.0.lock().unwrap().replies.insert(id.to_owned(), replies.iter().copied().collect());
    }

    /// Allows the answers of [`Reply::Held`].
    pub(super) fn answer_held(&self) {
        self.1.add_permits(1);
    }

    /// Kills a process at this moment of a request, after some effects.
    pub(super) fn kill(&self, sender: Pid, moment: Moment, after: u32) {
        self.0.lock().unwrap().kill = Some(Kill { sender, moment, after });
    }

    pub(super) fn kills(&self) -> u32 {
        self.0.lock().unwrap().kills
    }

    pub(super) fn received(&self) -> Vec<Received> {
        self.0.lock().unwrap().received.clone()
    }

    pub(super) fn received_of(&self, id: &str) -> Vec<Received> {
        self.received().into_iter().filter(|it| it.id == id).collect()
    }

    /// Returns order key and id of each effect, in their order.
    pub(super) fn effects(&self) -> Vec<(String, String)> {
        self.0.lock().unwrap().effects.clone()
    }

    pub(super) fn given(&self) -> BTreeMap<String, u32> {
        self.0.lock().unwrap().given.clone()
    }

    async fn handle(self, headers: HeaderMap) -> Response {
        let text = |name: &str| {
            headers.get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default()
        };
        let (id, key) = (text("webhook-id"), text("message-order-key"));
        assert_eq!(id, text("message-id"), "no id of these tests is hashed");
        let received = Received { id: id.clone(), at: Instant::now(), headers };
        self.0.lock().unwrap().received.push(received);
        if self.hit(Moment::Arrived) {
            return pending().await;
        }
        let reply = self.next_reply(&id);
        if let Some(reply) = reply {
            *self.0.lock().unwrap().given.entry(format!("{reply:?}")).or_default() += 1;
        }
        match reply {
            Some(Reply::Status(status, retry_after)) => {
                self.hit(Moment::Failed);
                let status = StatusCode::from_u16(status).unwrap();
                (status, [("retry-after", retry_after)], "no such order").into_response()
            }
            Some(Reply::Rejected(status)) => {
                self.hit(Moment::Failed);
                (StatusCode::from_u16(status).unwrap(), "no such order").into_response()
            }
            Some(Reply::Silent) => pending().await,
            Some(Reply::Late) => {
                self.accept(key, id);
                pending().await
            }
            None | Some(Reply::Held) => {
                if reply.is_some() {
                    self.1.acquire().await.unwrap().forget();
                }
                self.accept(key, id);
                if self.hit(Moment::Accepted) {
                    return pending().await;
                }
                self.hit(Moment::Answered(Duration::ZERO));
                StatusCode::NO_CONTENT.into_response()
            }
        }
    }

    /// Returns the reply to a request, unless the message is accepted.
    fn next_reply(&self, id: &str) -> Option<Reply> {
        let state = &mut *self.0.lock().unwrap();
        let replies = state.replies.get_mut(id)?;
        match replies.front()? {
            Reply::Rejected(status) => Some(Reply::Rejected(*status)),
            _ => replies.pop_front(),
        }
    }

    /// Has the effect of an id, unless it has happened.
    fn accept(&self, key: String, id: String) {
        let state = &mut *self.0.lock().unwrap();
        if state.accepted.insert(id.clone()) {
            state.effects.push((key, id));
            if let Some(kill) = &mut state.kill {
                kill.after = kill.after.saturating_sub(1);
            }
        }
    }

    /// Kills the sender if this is the moment.
    fn hit(&self, now: Moment) -> bool {
        let state = &mut *self.0.lock().unwrap();
        let is_now = |kill: &Kill| match (kill.moment, now) {
            _ if kill.after > 0 => false,
            (Moment::Answered(_), Moment::Answered(_)) => true,
            (expected, now) => expected == now,
        };
        let Some(kill) = state.kill.take_if(|kill| is_now(kill)) else { return false };
        state.kills += 1;
        match kill.moment {
            Moment::Answered(after) => {
                tokio::spawn(async move {
                    tokio::time::sleep(after).await;
                    kill_process(kill.sender, Signal::KILL).unwrap();
                });
            }
            _ => kill_process(kill.sender, Signal::KILL).unwrap(),
        }
        true
    }
}
