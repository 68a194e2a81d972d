//! Callers' values as JSON, which the server reads by the columns' types.

use std::collections::BTreeMap;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;

use crate::error::{DataError, ItemError};
use crate::layout::{BatchLimits, Column};

/// Fields as serde wrote them: no number goes through an `f64`.
pub(crate) type Fields = BTreeMap<String, Box<RawValue>>;

/// The form of an item.
#[derive(Debug)]
pub(crate) struct Shape {
    /// Every column that an item has, and no other. Those of the key come first.
    pub(crate) columns: Vec<Column>,
    /// How many of them are the key.
    pub(crate) key: usize,
    pub(crate) limits: BatchLimits,
}

impl Shape {
    /// One JSON object for each item.
    pub(crate) fn items<T: Serialize>(&self, items: &[T]) -> Result<Vec<String>, DataError> {
        let most = self.limits.items;
        if items.len() > most {
            return Err(DataError::TooMany { items: items.len(), most });
        }
        let mut texts = Vec::with_capacity(items.len());
        let mut bytes = 0_usize;
        for (index, item) in items.iter().enumerate() {
            let text = self.item(item).map_err(|problem| problem.at(index))?;
            bytes = bytes.saturating_add(text.len());
            texts.push(text);
        }
        if bytes > self.limits.bytes {
            return Err(DataError::TooLarge { bytes, most: self.limits.bytes });
        }
        Ok(texts)
    }

    fn item<T: Serialize>(&self, item: &T) -> Result<String, ItemError> {
        written(&self.fields(item)?)
    }

    /// The fields of an item that fits.
    pub(crate) fn fields<T: Serialize>(&self, item: &T) -> Result<Fields, ItemError> {
        let fields = fields(item)?;
        for (at, Column { name, .. }) in self.columns.iter().enumerate() {
            match fields.get(name) {
                None => return Err(ItemError::Missing(name.clone())),
                Some(null) if at < self.key && null.get() == "null" => {
                    return Err(ItemError::NullKey(name.clone()));
                }
                Some(_) => {}
            }
        }
        if fields.len() > self.columns.len() {
            let known = |name: &&String| self.columns.iter().any(|column| column.name == **name);
            let unknown = fields.keys().find(|name| !known(name));
            return Err(ItemError::Unknown(unknown.cloned().unwrap_or_default()));
        }
        Ok(fields)
    }
}

/// The fields of a struct or a map.
fn fields<T: Serialize>(item: &T) -> Result<Fields, ItemError> {
    let text = serde_json::to_string(item).map_err(ItemError::Json)?;
    if !text.starts_with('{') {
        return Err(ItemError::NotAnObject);
    }
    serde_json::from_str(&text).map_err(ItemError::Json)
}

pub(crate) fn written(fields: &Fields) -> Result<String, ItemError> {
    serde_json::to_string(fields).map_err(ItemError::Json)
}

/// Objects as an array.
pub(crate) fn array<'a>(items: impl IntoIterator<Item = &'a str>) -> String {
    let mut text = String::from("[");
    for item in items {
        if text.len() > 1 {
            text.push(',');
        }
        text.push_str(item);
    }
    text.push(']');
    text
}

/// A row as the caller wants it.
pub(crate) fn row<R: DeserializeOwned>(text: Option<&str>) -> Result<R, DataError> {
    serde_json::from_str(text.ok_or(DataError::OtherRows)?).map_err(DataError::Row)
}

/// A number that an answer has at `column`, if it has one.
pub(crate) fn number(row: &[Option<String>], column: usize) -> Option<u64> {
    row.get(column)?.as_deref()?.parse().ok()
}

/// A text that an answer has at `column`, if it has one.
pub(crate) fn text(row: &[Option<String>], column: usize) -> Option<&str> {
    row.get(column)?.as_deref()
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn problem(item: &Value) -> String {
        let columns = vec!["k".into(), "a".into()];
        let shape = Shape { columns, key: 1, limits: BatchLimits::default() };
        shape.item(item).unwrap_or_else(|problem| problem.to_string())
    }

    #[test]
    fn an_item_has_exactly_the_columns_of_the_layout() {
        assert_eq!(problem(&json!({"a": null, "k": "x"})), r#"{"a":null,"k":"x"}"#);
        assert_eq!(problem(&json!({"k": 1})), "it has no field \"a\"");
        assert_eq!(problem(&json!({"k": null, "a": 1})), "\"k\" is null, and is part of the key");
        let unknown = json!({"k": 1, "a": 2, "b": 3});
        assert_eq!(problem(&unknown), "its field \"b\" is no column of the layout");
        assert_eq!(problem(&json!([1])), "the item is no struct or map");
    }

    #[test]
    fn numbers_are_sent_with_every_digit() {
        #[derive(Serialize)]
        struct Item<'a> {
            k: u128,
            a: &'a RawValue,
        }
        let columns = vec!["k".into(), "a".into()];
        let shape = Shape { columns, key: 1, limits: BatchLimits::default() };
        let a: &RawValue = serde_json::from_str("{\"b\":1.00000000000000000001}").unwrap();
        let item = shape.item(&Item { k: u128::MAX, a }).unwrap();
        assert_eq!(item, format!("{{\"a\":{a},\"k\":{}}}", u128::MAX));
    }

    #[test]
    fn a_call_has_limits() {
        let limits = BatchLimits { items: 2, bytes: 20, ..BatchLimits::default() };
        let shape = Shape { columns: vec!["k".into()], key: 1, limits };
        let item = json!({"k": "abc"});
        assert!(shape.items(&[&item]).is_ok());
        assert!(matches!(shape.items(&[&item; 3]), Err(DataError::TooMany { items: 3, most: 2 })));
        assert!(matches!(shape.items(&[&item; 2]), Err(DataError::TooLarge { bytes: 22, .. })));
    }

    #[test]
    fn items_are_joined() {
        assert_eq!(array([]), "[]");
        assert_eq!(array(["{}", "{\"a\":1}"]), "[{},{\"a\":1}]");
    }
}
