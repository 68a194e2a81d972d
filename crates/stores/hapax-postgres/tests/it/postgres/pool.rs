//! A store on the server of an sqlx pool.

use hapax_postgres::{PostgresConnectError, PostgresOptions, PostgresStore};
use hapax_testkit::servers::PostgresServer;
use sqlx::postgres::{PgConnectOptions, PgPool, PgPoolOptions, PgSslMode};

use super::support::*;

fn options(server: &PostgresServer) -> PgConnectOptions {
    PgConnectOptions::new_without_pgpass()
        .host("127.0.0.1")
        .port(server.port())
        .username("postgres")
        .database("postgres")
}

fn lazy(options: PgConnectOptions) -> PgPool {
    PgPoolOptions::new().connect_lazy_with(options)
}

#[tokio::test]
async fn a_store_uses_the_role_the_database_and_the_password_of_a_pool() {
    let server = PostgresServer::start().await;
    // Names and passwords that a URL would have to encode.
    let password = "p@ss:w/rd+%20 ü?";
    let text = format!(r#"CREATE ROLE "o'ne@x/y" LOGIN PASSWORD '{password}'"#);
    server.sql("postgres", &text).await;
    server.sql("postgres", r#"CREATE DATABASE "a b" OWNER "o'ne@x/y""#).await;
    let options = options(&server).username("o'ne@x/y").password(password).database("a b");
    let store = PostgresStore::from_pool(lazy(options)).await.unwrap();
    expect_stored(&store, &claim(1)).await;
    let rows = server.sql("a b", "SELECT count(*) FROM hapax_cells").await;
    assert_eq!(rows.trim(), "1");
    let config =
        format!("{:?}", PostgresOptions::from_pool(&lazy(self::options(&server))).unwrap());
    assert!(config.contains("postgres"), "{config}");
    store.close().await;
}

#[tokio::test]
async fn options_of_a_pool_that_a_store_cannot_use_are_rejected() {
    let server = PostgresServer::start().await;
    let strict = options(&server).ssl_mode(PgSslMode::Require);
    // No TLS on the server: the store does not connect in the clear.
    let refused = PostgresStore::from_pool(lazy(strict.clone())).await.unwrap_err();
    assert!(!matches!(refused, PostgresConnectError::Pool(_)), "{refused}");
    let half = strict.clone().ssl_client_cert_from_pem(b"-----BEGIN CERTIFICATE-----");
    let refused = PostgresOptions::from_pool(&lazy(half)).unwrap_err();
    assert!(matches!(refused, PostgresConnectError::CertificateParameters(_)), "{refused}");
    assert!(refused.to_string().contains("expected sslcert and sslkey together"), "{refused}");
    // With certificates the default mode, `prefer`, is as strict.
    for pool in [strict, options(&server)] {
        let absent = pool.ssl_root_cert("/nowhere/root.pem");
        let refused = PostgresOptions::from_pool(&lazy(absent)).unwrap_err();
        assert!(refused.to_string().contains("/nowhere/root.pem"), "{refused}");
    }
}
