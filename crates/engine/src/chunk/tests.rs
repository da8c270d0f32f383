use super::{MAX, cut};
use crate::vectors::load;
use serde_json::Value;

/// The data that a vector describes.
fn data(parts: &Value) -> Vec<u8> {
    let mut data = Vec::new();
    for part in parts.as_array().unwrap() {
        let length = part["length"].as_u64().unwrap() as usize;
        let start = data.len();
        data.resize(start + length, part["byte"].as_u64().unwrap_or(0) as u8);
        if let Some(seed) = part["seed"].as_str() {
            let mut stream = blake3::Hasher::new().update(seed.as_bytes()).finalize_xof();
            stream.set_position(part["offset"].as_u64().unwrap());
            stream.fill(&mut data[start..]);
        }
    }
    data
}

#[test]
fn cuts_are_those_of_the_vectors() {
    let vectors = load("chunks");
    for vector in vectors["chunks"].as_array().unwrap() {
        let data = data(&vector["data"]);
        let ends: Vec<usize> =
            vector["ends"].as_array().unwrap().iter().map(|end| end.as_u64().unwrap() as usize).collect();
        let mut at = 0;
        let found: Vec<usize> = std::iter::from_fn(|| {
            (at < data.len()).then(|| {
                // No more than a chunk can have is needed.
                at += cut(&data[at..data.len().min(at + MAX)]);
                at
            })
        })
        .collect();
        assert_eq!(found, ends, "{}", vector["name"]);
    }
}
