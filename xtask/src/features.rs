//! Builds with each feature alone.

use serde_json::Value;

use crate::sh::{Failure, Outcome, Run};

/// Checks the libraries of each published crate with one feature at a time.
pub(crate) fn run() -> Outcome {
    let metadata = Run::cargo().args(["metadata", "--format-version=1", "--no-deps"]).read()?;
    let metadata: Value = serde_json::from_str(&metadata)
        .map_err(|error| Failure::new(format!("cargo metadata is not JSON: {error}")))?;
    for (package, features) in published(&metadata) {
        for feature in [String::new()].into_iter().chain(features) {
            Run::cargo()
                .args(["check", "--quiet", "--package", &package, "--no-default-features"])
                .args(["--features", &feature])
                .show()?;
        }
    }
    Ok(())
}

/// Returns the published packages with a library, and their features.
fn published(metadata: &Value) -> Vec<(String, Vec<String>)> {
    let array = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let mut packages: Vec<_> = array(&metadata["packages"])
        .iter()
        .filter(|package| package["publish"] != Value::Array(Vec::new()))
        .filter(|package| array(&package["targets"]).iter().any(|it| it["kind"][0] == "lib"))
        .map(|package| {
            let name = package["name"].as_str().unwrap_or_default().to_owned();
            let features = package["features"].as_object();
            let features = features.into_iter().flat_map(|all| all.keys());
            (name, features.filter(|name| *name != "default").cloned().collect())
        })
        .collect();
    packages.sort();
    packages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_libraries_are_listed_with_their_features() {
        let lib = serde_json::json!([{"kind": ["lib"]}]);
        let metadata = serde_json::json!({"packages": [
            {"name": "b", "publish": null, "features": {"default": [], "x": []}, "targets": lib},
            {"name": "a", "publish": [], "features": {}, "targets": lib},
            {"name": "c", "publish": null, "features": {}, "targets": [{"kind": ["bin"]}]},
        ]});
        assert_eq!(published(&metadata), [("b".to_owned(), vec!["x".to_owned()])]);
    }
}
