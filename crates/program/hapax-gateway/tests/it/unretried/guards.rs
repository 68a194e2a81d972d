//! Guards against requests to the wrong service, unseen by operators, or at the cost of retries.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::pin::Pin;
use std::process::Command;
use std::task::{Context, Poll};

use hapax_core::store::{Draft, Stamp, Swap};
use hapax_core::{LeaseId, OperationId, Record, WriteId};
use hapax_gateway::{
    GivenSettings, PolicyConfig, ReconcileAuthorization as Authorization, RouteConfig,
};
use http_body::Frame;

use super::*;

/// The takeover of an earlier version: a new lease id under a new fence, and the description of the claim before.
async fn taken_over(store: &MemoryStore, id: &OperationId) {
    let stored = store.load(id).await.unwrap().stored.unwrap();
    let (lease, attempt) = (stored.record.terms.lease, stored.record.attempt + 1);
    let lease_id = LeaseId::from_bytes([9; 16]);
    let record = Record { lease_id, attempt, ..stored.record };
    let draft = Draft { record, stamp: Stamp::NextFence, lease, keep: None };
    let (expected, write_id) = (Some(stored.write_id), WriteId::from_bytes([8; 16]));
    store.swap(Swap { id: *id, expected, write_id, draft }).await.unwrap();
}

/// A rollback to a version that does not describe the execution, whose reconcile URL is that of another service.
#[tokio::test(flavor = "multi_thread")]
async fn the_hook_of_an_execution_does_not_decide_about_its_successor_of_an_earlier_version() {
    let upstream = upstream(|_| did_not_happen()).await;
    let (clock, store) = store();
    leave(&clock, &store, "left", Some(described(&store, &upstream))).await;
    leave(&clock, &store, "other", Some(described(&store, &upstream))).await;
    let [left, other] = ["left", "other"]
        .map(|key| engine(&store).operation_id(&Scope::shared(), &key.parse().unwrap()));
    taken_over(&store, &left).await;
    clock.advance(HOUR);
    let gateway = start_on(reconciling(&upstream, NEVER), &store).await;
    assert_eq!(reconcile(&gateway, &left.to_string()).await, "not-described");
    let shown = show(&gateway, &left.to_string()).await;
    assert_eq!((&shown["state"], &shown["attempt"]), (&json!("unknown"), &json!(2)));
    // Operators see whose operation it is.
    assert_eq!(shown["described"]["key"], "left");
    assert_eq!(shown["described"]["hook"], Value::Null);
    assert!(asked(&upstream).is_empty());
    assert_eq!(reconcile(&gateway, &other.to_string()).await, "did-not-happen");
}

fn audit_lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reconcile_request_of_an_operator_has_two_audit_lines_with_its_result() {
    let upstream = upstream(|_| did_not_happen()).await;
    let folder = tempfile::tempdir().unwrap();
    let audit = folder.path().join("audit.jsonl");
    let mut config = on_file(&upstream, folder.path(), NEVER);
    config.audit_file = Some(audit.clone());
    let gateway = start(config).await;
    assert_eq!(pay(&gateway).await.status, 500);
    let id = id(&gateway).await;
    let fence = show(&gateway, &id).await["fence"].clone();
    let (status, found) = call(&gateway, &id, "reconcile", &json!({ "who": "ann" })).await;
    assert_eq!((status, &found["result"]), (200, &json!("did-not-happen")));
    let lines = audit_lines(&audit);
    let stages: Vec<_> = lines.iter().map(|line| (&line["stage"], &line["result"])).collect();
    assert_eq!(
        stages,
        [(&json!("intended"), &Value::Null), (&json!("done"), &json!("did-not-happen"))]
    );
    for line in &lines {
        assert_eq!((&line["id"], &line["fence"]), (&json!(id), &fence));
        assert_eq!((&line["who"], &line["by"]), (&json!("ann"), &json!("api")));
        assert_eq!(line["decision"], lines[0]["decision"]);
        assert_eq!(line["reconcile"], format!("http://{}/outcome", upstream.address));
    }
    // The record shows it as well.
    let decision = show(&gateway, &id).await["decision"].clone();
    assert_eq!((&decision["who"], &decision["by"]), (&json!("ann"), &json!("api")));
    assert_eq!(decision["decision"], lines[0]["decision"]);
    // Nothing was requested, so nothing is written.
    assert_eq!(reconcile(&gateway, &id).await, "decided");
    assert_eq!(audit_lines(&audit).len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_an_audit_file_no_reconcile_request_of_an_operator_is_sent() {
    let upstream = upstream(|_| did_not_happen()).await;
    let folder = tempfile::tempdir().unwrap();
    let mut config = on_file(&upstream, folder.path(), NEVER);
    let audit = folder.path().join("audit.jsonl");
    std::fs::create_dir(&audit).unwrap();
    config.audit_file = Some(audit);
    let gateway = start(config).await;
    assert_eq!(pay(&gateway).await.status, 500);
    let id = id(&gateway).await;
    let (status, error) = call(&gateway, &id, "reconcile", &json!({})).await;
    assert_eq!((status, &error["code"]), (503, &json!("audit")), "{error}");
    assert!(asked(&upstream).is_empty());
    assert_eq!(show(&gateway, &id).await["state"], "unknown");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_record_that_the_background_released_says_so() {
    let upstream = upstream(|_| did_not_happen()).await;
    let folder = tempfile::tempdir().unwrap();
    let gateway = start(on_file(&upstream, folder.path(), OFTEN)).await;
    assert_eq!(pay(&gateway).await.status, 500);
    let id = id(&gateway).await;
    reaches(&gateway, &id, "released").await;
    let shown = show(&gateway, &id).await;
    let decision = &shown["decision"];
    assert_eq!((&decision["by"], &decision["outcome"]), (&json!("hook"), &json!("did-not-happen")));
    assert_eq!(decision["from"], format!("http://{}/outcome", upstream.address));
    assert_eq!(shown["ended"].as_str().unwrap()[..16], decision["at"].as_str().unwrap()[..16]);
}

/// The words of settings.
fn words<'a>(
    settings: impl IntoIterator<Item = (&'static str, &'a str)>,
) -> BTreeMap<&'static str, Vec<String>> {
    settings.into_iter().map(|(name, value)| (name, vec![value.to_owned()])).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_credentials_of_a_service_are_not_sent_to_that_of_a_route_with_another_url() {
    let (ours, theirs) = (upstream(|_| paid()).await, upstream(|_| paid()).await);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("authorization");
    std::fs::write(&file, "Bearer of-ours\n").unwrap();
    let [url, other] = [&ours, &theirs].map(|it| format!("http://{}/outcome", it.address));
    let upstream = ours.url().to_string();
    let given = GivenSettings {
        gateway: words([("upstream", upstream.as_str())]),
        policy: words([
            ("on_unknown", "reconcile"),
            ("reconcile_url", url.as_str()),
            ("reconcile_authorization", file.to_str().unwrap()),
            ("scope", "x-tenant"),
        ]),
        routes: vec![words([("path", "/theirs"), ("reconcile_url", other.as_str())])],
    };
    let read = Config::read(&given).unwrap();
    let mut config = on_file(&ours, folder.path(), OFTEN);
    (config.policy, config.routes) = (read.policy, read.routes);
    let gateway = start(config).await;
    for path in ["/pay", "/theirs"] {
        let fields = [("idempotency-key", path), ("x-tenant", "acme")];
        let fields = fields.map(|(name, value)| (name, format!("\"{value}\"")));
        let fields: Vec<_> = fields.iter().map(|(name, value)| (*name, value.as_str())).collect();
        assert_eq!(post_with(gateway.local_addr(), path, &fields, "x").await.status, 500);
    }
    until("both reconcile requests", || asked(&ours).len() + asked(&theirs).len() == 2).await;
    let sent = |upstream| {
        let asked = asked(upstream);
        asked.iter().map(|it| it.header("authorization").to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(
        (sent(&ours), sent(&theirs)),
        (vec!["Bearer of-ours".to_owned()], vec![String::new()])
    );
}

/// Two services share neither name nor URL, but two routes of one service may have the same.
#[tokio::test(flavor = "multi_thread")]
async fn of_routes_with_one_name_and_hook_that_of_the_path_applies() {
    let upstream = upstream(|_| paid()).await;
    let folder = tempfile::tempdir().unwrap();
    let mut config = on_file(&upstream, folder.path(), NEVER);
    let own = config.policy.clone();
    let without = PolicyConfig { reconcile_authorization: None, ..own.clone() };
    let routes = [("/first", without.clone()), ("/pay", own), ("/last", without)];
    config.routes = routes.map(|(path, policy)| named(path, policy)).to_vec();
    let gateway = start(config).await;
    for path in ["/pay", "/last"] {
        let key = format!("\"{path}\"");
        let fields = [("idempotency-key", key.as_str()), FIELDS[1], FIELDS[2]];
        assert_eq!(post_with(gateway.local_addr(), path, &fields, "x").await.status, 500);
        let found = get(gateway.admin_addr().unwrap(), "/api/keys?state=unknown").await.json();
        let id = found["keys"][0]["id"].as_str().unwrap().to_owned();
        let expected = if path == "/pay" { "happened" } else { "no-authorization" };
        assert_eq!(reconcile(&gateway, &id).await, expected, "{path}");
    }
    assert_eq!(asked(&upstream).len(), 1);
}

/// A route named `payments`.
fn named(path: &str, policy: PolicyConfig) -> RouteConfig {
    RouteConfig { name: Some("payments".to_owned()), ..RouteConfig::new(path, policy) }
}

/// A configuration that reads its credentials from a file of this mode.
fn with_file(upstream: &Upstream, folder: &Path, mode: u32) -> (Config, PathBuf) {
    let file = folder.join("authorization");
    std::fs::write(&file, "Bearer x\n").unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
    let mut config = reconciling(upstream, NEVER);
    config.policy.reconcile_authorization = Some(Authorization::File(file.clone()));
    (config, file)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_doctor_finds_credentials_that_other_users_can_read() {
    let upstream = upstream(|_| did_not_happen()).await;
    let folder = tempfile::tempdir().unwrap();
    for (mode, subjects) in
        [(0o600, &["reconcile"][..]), (0o640, &["reconcile_authorization", "reconcile"])]
    {
        let (config, file) = with_file(&upstream, folder.path(), mode);
        let found = Gateway::probe(&config).await.unwrap();
        let found_subjects: Vec<_> = found.iter().map(|finding| &*finding.subject).collect();
        assert_eq!(found_subjects, subjects, "{mode:o}");
        let names_file = found[0].found.contains(file.to_str().unwrap());
        assert_eq!(names_file, mode != 0o600, "{found:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pipe_in_place_of_the_credentials_is_an_error_and_waits_for_no_writer() {
    let upstream = upstream(|_| did_not_happen()).await;
    let folder = tempfile::tempdir().unwrap();
    let (config, file) = with_file(&upstream, folder.path(), 0o600);
    std::fs::remove_file(&file).unwrap();
    assert!(Command::new("mkfifo").arg(&file).status().unwrap().success());
    let error = config.check().unwrap_err();
    assert!(error.to_string().contains("expected a regular file") && !error.may_end(), "{error}");
}

/// A body without an end.
struct Endless;

impl http_body::Body for Endless {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_responses_in_the_background_do_not_delay_those_that_a_retry_waits_for() {
    let upstream = upstream(|seen| match seen.header("idempotency-key") {
        "\"left\"" => Response::new(Body::new(Endless)),
        _ => paid(),
    })
    .await;
    let (clock, store) = store();
    for number in 0..4 {
        leave(&clock, &store, &number.to_string(), Some(described(&store, &upstream))).await;
    }
    clock.advance(HOUR);
    let gateway = start_on(reconciling(&upstream, OFTEN), &store).await;
    until("reconcile requests", || asked(&upstream).len() == 4).await;
    assert_eq!(pay(&gateway).await.status, 500);
    let answer = pay(&gateway).await;
    assert_eq!((answer.status, answer.text().as_str()), (200, "paid"));
}

#[tokio::test(flavor = "multi_thread")]
async fn counts_of_a_pass_end_with_a_reload_after_which_no_route_reconciles() {
    let upstream = upstream(|_| did_not_happen()).await;
    let config = reconciling(&upstream, OFTEN);
    let mut blocks = config.clone();
    (blocks.policy.on_unknown, blocks.policy.reconcile_url) = (OnUnknown::Block, None);
    blocks.policy.reconcile_authorization = None;
    let gateway = start(config).await;
    assert_eq!(pay(&gateway).await.status, 500);
    measures(&gateway, "hapax_unretried_not_requested{reason=\"not-described\"} 1").await;
    gateway.reload(blocks).unwrap();
    measures(&gateway, "hapax_unretried_not_requested{reason=\"not-described\"} 0").await;
}
