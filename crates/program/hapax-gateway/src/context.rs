//! Context of a request beside its message.

use std::sync::Arc;

use hapax_proxy::{Peer, Switch};

use crate::observe::RealResponseSlot;
use crate::snapshot::Route;

/// The request extension of the gateway: route and connection of a request.
#[derive(Clone, Debug)]
pub(crate) struct RequestContext {
    pub(crate) route: Arc<Route>,
    pub(crate) peer: Peer,
    /// The switch to another protocol, if the connection allows it.
    pub(crate) switch: Option<Switch>,
    /// Set for the shadow of an observed request.
    pub(crate) shadow: Option<RealResponseSlot>,
}
