//! A Redis cluster.

use tokio::time::{Instant, sleep};

use super::{EVERY, RedisServer, RedisServerOptions, TIMEOUT, free_port};

/// Number of slots of every cluster.
const SLOTS: usize = 16_384;

/// A cluster of masters without replicas, which sync every write; dropping it kills them.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
}

impl RedisCluster {
    /// Starts a cluster of `count` masters that share the slots.
    pub async fn start(count: usize) -> Self {
        let mut nodes = Vec::new();
        for _ in 0..count {
            let options = RedisServerOptions::new()
                // A killed master loses nothing.
                .set("appendfsync", "always")
                .set("cluster-enabled", "yes")
                .set("cluster-config-file", "nodes.conf")
                .set("cluster-node-timeout", "1000")
                // The default port may be out of range.
                .set("cluster-port", free_port().to_string())
                // Each master serves its slots while another one is down.
                .set("cluster-require-full-coverage", "no");
            nodes.push(RedisServer::start_with(options).await);
        }
        let cluster = Self { nodes };
        for (at, node) in cluster.nodes.iter().enumerate() {
            ok(node, &format!("CLUSTER SET-CONFIG-EPOCH {}", at + 1)).await;
            let (from, to) = (SLOTS * at / count, SLOTS * (at + 1) / count - 1);
            ok(node, &format!("CLUSTER ADDSLOTSRANGE {from} {to}")).await;
            let port = node.command("CONFIG GET cluster-port").await;
            let port = port.lines().last().unwrap_or_default();
            ok(&cluster.nodes[0], &format!("CLUSTER MEET 127.0.0.1 {} {port}", node.port())).await;
        }
        cluster.agree().await;
        cluster
    }

    /// Returns its masters.
    #[must_use]
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// Returns one of its masters, to be killed and restarted.
    pub fn node(&mut self, at: usize) -> &mut RedisServer {
        &mut self.nodes[at]
    }

    /// Waits until every node knows a master for every slot.
    pub async fn agree(&self) {
        let deadline = Instant::now() + TIMEOUT;
        for node in &self.nodes {
            while !self.is_whole(node).await {
                assert!(Instant::now() < deadline, "the nodes do not find each other");
                sleep(EVERY).await;
            }
        }
    }

    async fn is_whole(&self, node: &RedisServer) -> bool {
        let info = node.command("CLUSTER INFO").await;
        let has = |line: &str| info.lines().any(|said| said == line);
        has("cluster_state:ok")
            && has("cluster_slots_ok:16384")
            && has(&format!("cluster_known_nodes:{}", self.nodes.len()))
    }
}

async fn ok(node: &RedisServer, command: &str) {
    assert_eq!(node.command(command).await, "+OK", "{command}");
}
