//! Orders that are placed once: each cart of a customer becomes one order, however often the
//! request is sent.
//!
//! ```text
//! cargo run -p hapax-postgres-data --example orders -- postgres://postgres@127.0.0.1/postgres
//! ```

use hapax_postgres_data::{Column, DriverError, InsertOrFetch, Inserted, LayoutError, TableName};
use serde::{Deserialize, Serialize};
use tokio_postgres::{Client, NoTls};

pub(crate) const TABLES: &str = "
CREATE TABLE IF NOT EXISTS orders (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer text NOT NULL, cart uuid NOT NULL, UNIQUE (customer, cart),
    total numeric(12, 2) NOT NULL, currency char(3) NOT NULL,
    placed timestamptz NOT NULL DEFAULT now());
CREATE TABLE IF NOT EXISTS shipments (order_id bigint NOT NULL REFERENCES orders)";

/// What a customer sends. Money is text: in JSON, a number has too few digits.
#[derive(Serialize)]
pub(crate) struct Order<'a> {
    pub(crate) customer: &'a str,
    pub(crate) cart: &'a str,
    pub(crate) total: &'a str,
    pub(crate) currency: &'a str,
}

/// What is there then.
#[derive(Deserialize, Debug)]
pub(crate) struct Placed {
    pub(crate) id: i64,
    pub(crate) total: String,
}

/// The table, as this service uses it.
pub(crate) fn orders() -> Result<InsertOrFetch, LayoutError> {
    InsertOrFetch::into_table(TableName::in_schema("public", "orders"))
        .key("customer")
        .key("cart")
        .field(Column::new("total").read_as_text())
        .field("currency")
        .also_read("id")
        .build()
}

/// Places an order and has it shipped, both or neither; says what is there if that was done before.
pub(crate) async fn place(
    client: &mut Client,
    orders: &InsertOrFetch,
    order: &Order<'_>,
) -> Result<String, DriverError> {
    let transaction = client.transaction().await?;
    let placed: Inserted<Placed> = orders.insert(&transaction, order).await?;
    Ok(match placed {
        Inserted::Created(Placed { id, total }) => {
            let ship = "INSERT INTO shipments VALUES ($1)";
            transaction.execute(ship, &[&id]).await?;
            // If its reply is lost, the customer sends the cart again.
            transaction.commit().await?;
            format!("placed order {id} of {total}")
        }
        Inserted::Exists(Placed { id, total }) => {
            format!("order {id} of {total} was placed before")
        }
        Inserted::ExistsWithDifferent { field, row } => {
            format!("refused: order {} is of this cart and has another {field}", row.id)
        }
    })
}

#[tokio::main]
async fn main() -> Result<(), DriverError> {
    let url = std::env::args().nth(1).ok_or("which database? postgres://…")?;
    let (mut client, connection) = tokio_postgres::connect(&url, NoTls).await?;
    tokio::spawn(connection);
    client.batch_execute(TABLES).await?;
    let orders = orders()?;
    orders.verify(&client).await?;
    let cart = "0198c0de-0000-7000-8000-000000000001";
    for total in ["99.90", "99.90", "89.90"] {
        let order = Order { customer: "c-1", cart, total, currency: "EUR" };
        println!("{}", place(&mut client, &orders, &order).await?);
    }
    for (name, statement) in orders.sql() {
        println!("\n-- {name}\n{statement};");
    }
    Ok(())
}
