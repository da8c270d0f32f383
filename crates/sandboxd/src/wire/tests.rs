use super::*;
use crate::pack::Value;
use proptest::prelude::*;
use serde_json::Value as Json;

const KEY: [u8; 32] = [1; 32];

fn take(side: &mut Connection) -> Vec<u8> {
    std::mem::take(side.output())
}

/// Feed bytes in pieces of `size` and write down what happened.
fn events(side: &mut Connection, bytes: &[u8], size: usize) -> Vec<String> {
    let mut seen = Vec::new();
    for piece in bytes.chunks(size.min(1_024)) {
        side.feed(piece);
        loop {
            match side.next() {
                Ok(Some(event)) => seen.push(format!("{event:?}")),
                Ok(None) => break,
                Err(error) => {
                    seen.push(format!("{error:?}"));
                    return seen;
                }
            }
        }
    }
    seen
}

/// A client and a daemon that have proved the key to each other.
fn pair() -> (Connection, Connection) {
    let (mut client, mut daemon) = (Connection::client(KEY, [2; 32]), Connection::daemon(KEY, [3; 32]));
    events(&mut daemon, &take(&mut client), 64);
    assert_eq!(events(&mut client, &take(&mut daemon), 64), ["Ready"]);
    assert_eq!(events(&mut daemon, &take(&mut client), 64), ["Ready"]);
    (client, daemon)
}

fn info_args() -> Vec<u8> {
    MapWriter::new(0).done()
}

/// The code of the GOAWAY that a side has said last.
fn last_word(side: &mut Connection) -> String {
    let out = take(side);
    let mut at = 0;
    let mut code = String::new();
    while at < out.len() {
        let length = u32::from_be_bytes(out[at..at + 4].try_into().unwrap()) as usize;
        let payload = &out[at + HEADER..at + HEADER + length];
        if out[at + 4] == Kind::Goaway as u8 {
            code = Map::parse(payload).unwrap().str("code").unwrap().to_string();
        }
        at += HEADER + length;
    }
    code
}

#[test]
fn a_wrong_key_is_unauthorized_on_both_sides() {
    let (mut client, mut daemon) = (Connection::client(KEY, [2; 32]), Connection::daemon([9; 32], [3; 32]));
    events(&mut daemon, &take(&mut client), 64);
    assert!(events(&mut client, &take(&mut daemon), 64)[0].contains("unauthorized"));
    assert_eq!(last_word(&mut client), "unauthorized");
    assert!(!client.is_ready());

    let mut daemon = Connection::daemon(KEY, [3; 32]);
    events(&mut daemon, &take(&mut Connection::client(KEY, [2; 32])), 64);
    take(&mut daemon);
    let proof = MapWriter::new(1).bin("proof", &[0; 32]).done();
    let bytes = [&header(Kind::Hello, 0, proof.len())[..], &proof].concat();
    assert!(events(&mut daemon, &bytes, 64)[0].contains("unauthorized"));
    assert_eq!(last_word(&mut daemon), "unauthorized");
    assert!(events(&mut daemon, &bytes, 64).is_empty(), "a dead connection hears nothing");
}

#[test]
fn generations_without_a_common_one() {
    for (generation, fits) in [(0, false), (1, true), (2, true), (3, false), (u32::MAX, false)] {
        let mut daemon = Connection::daemon(KEY, [3; 32]);
        let hello = MapWriter::new(2).uint("generation", generation.into()).bin("nonce", &[2; 32]).done();
        let bytes = [&header(Kind::Hello, 0, hello.len())[..], &hello].concat();
        assert_eq!(events(&mut daemon, &bytes, 64).is_empty(), fits, "{generation}");
        assert_eq!(last_word(&mut daemon), if fits { "" } else { "generation" });
    }
}

#[test]
fn long_arguments_arrive_as_one_map() {
    let (mut client, mut daemon) = pair();
    let args = MapWriter::new(1).bin("x", &vec![7; 300_000]).done();
    let id = client.open("exec.start", &args);
    let mut rest = &args[..];
    let mut seen = Vec::new();
    while !rest.is_empty() {
        let room = client.credit(id);
        assert!(room > 1, "arguments are credited as they arrive");
        let (now, later) = rest.split_at(rest.len().min(room - 1).min(10_000));
        client.data(id, 3, now);
        rest = later;
        seen.extend(events(&mut daemon, &take(&mut client), 1_000));
        events(&mut client, &take(&mut daemon), 1_000);
    }
    assert_eq!(seen.len(), 1);
    assert!(seen[0].starts_with("Open { stream: 1, op: \"exec.start\""));
    assert_eq!(daemon.args_arriving, 0);
}

#[test]
fn credit_holds_a_sender_and_comes_back() {
    let (mut client, mut daemon) = pair();
    let id = client.open("sys.info", &info_args());
    events(&mut daemon, &take(&mut client), 64);
    let piece = vec![0; 65_535];
    for _ in 0..4 {
        assert!(daemon.credit(id) >= 65_536);
        daemon.data(id, 1, &piece);
    }
    assert_eq!(daemon.credit(id), 0);
    assert_eq!(events(&mut client, &take(&mut daemon), 1_024).len(), 4);
    client.consumed(id, 131_071);
    assert!(take(&mut client).is_empty(), "half of the window has not been taken yet");
    client.consumed(id, 1);
    assert_eq!(events(&mut daemon, &take(&mut client), 64), ["Credit { stream: 1 }"]);
    assert_eq!(daemon.credit(id), 131_072);
}

#[test]
fn frames_for_what_is_over_are_discarded() {
    let (mut client, mut daemon) = pair();
    let id = client.open("sys.info", &info_args());
    events(&mut daemon, &take(&mut client), 64);
    daemon.end_stream(id, &info_args());
    client.data(id, 0, b"late");
    client.eof(id, 0);
    client.consumed(id, 200_000);
    client.reset(id, "late");
    assert!(events(&mut daemon, &take(&mut client), 64).is_empty());
    daemon.reset(id, "crossed");
    assert!(events(&mut client, &take(&mut daemon), 64).is_empty());
}

#[test]
fn a_stream_too_many_is_an_error() {
    let (mut client, mut daemon) = pair();
    for _ in 0..1_024 {
        client.open("sys.info", &info_args());
        assert_eq!(events(&mut daemon, &take(&mut client), 64).len(), 1);
    }
    client.open("sys.info", &info_args());
    assert!(events(&mut daemon, &take(&mut client), 64)[0].contains("more than 1024"));
    assert_eq!(last_word(&mut daemon), "protocol");
}

#[test]
fn a_ping_is_answered() {
    let (mut client, mut daemon) = pair();
    client.ping(*b"12345678");
    assert!(events(&mut daemon, &take(&mut client), 3).is_empty());
    let pong = [49, 50, 51, 52, 53, 54, 55, 56];
    assert_eq!(events(&mut client, &take(&mut daemon), 64), [format!("Pong({pong:?})")]);
}

fn vectors(name: &str) -> Json {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../spec/vectors/wire/");
    let text =
        std::fs::read_to_string(format!("{path}{name}")).unwrap_or_else(|error| panic!("{name}: {error}"));
    serde_json::from_str(&text).unwrap()
}

fn bytes(json: &Json) -> Vec<u8> {
    let hex = json.as_str().unwrap();
    assert!(hex.len().is_multiple_of(2));
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

#[test]
fn vectors_frames() {
    let frames = vectors("frames.json");
    let frames = frames["frames"].as_array().unwrap();
    assert!(!frames.is_empty());
    for frame in frames {
        let (payload, whole) = (bytes(&frame["payload_hex"]), bytes(&frame["frame_hex"]));
        let kind = Kind::from_byte(u8::try_from(frame["kind"].as_u64().unwrap()).unwrap()).unwrap();
        let stream = u32::try_from(frame["stream"].as_u64().unwrap()).unwrap();
        let own = [&header(kind, stream, payload.len())[..], &payload].concat();
        assert_eq!(own, whole, "{}", frame["name"]);
        if !matches!(kind, Kind::Data | Kind::Eof | Kind::Credit | Kind::Ping | Kind::Pong) {
            assert!(Map::parse(&payload).is_ok(), "{}", frame["name"]);
        }
        // A machine in the right state takes it.
        let from_client = matches!(kind, Kind::Open | Kind::Ping)
            || (matches!(kind, Kind::Data | Kind::Eof) && payload[0] == 0)
            || kind == Kind::Reset;
        let mut side = if kind == Kind::Hello {
            Connection::daemon(KEY, [3; 32])
        } else {
            let (mut client, mut daemon) = pair();
            if stream != 0 && kind != Kind::Open {
                client.last_own_stream = stream.saturating_sub(2);
                client.open("sys.info", &info_args());
                events(&mut daemon, &take(&mut client), 64);
            }
            if from_client { daemon } else { client }
        };
        let seen = events(&mut side, &whole, 1_024);
        assert!(!seen.iter().any(|event| event.starts_with("ProtocolError")), "{}: {seen:?}", frame["name"]);
    }
}

#[test]
fn vectors_hello() {
    let hello = vectors("hello.json");
    let part = |name: &str| bytes(&hello[name]);
    let fixed = |name: &str| <[u8; 32]>::try_from(part(name)).unwrap();
    assert_eq!(hello["generation"].as_u64(), Some(GENERATION.into()));
    let mut client = Connection::client(fixed("key_hex"), fixed("nonce_client_hex"));
    let mut daemon = Connection::daemon(fixed("key_hex"), fixed("nonce_daemon_hex"));
    assert_eq!(*client.output(), part("client_hello1_hex"));
    events(&mut daemon, &take(&mut client), 1);
    assert_eq!(*daemon.output(), part("daemon_hello_hex"));
    events(&mut client, &take(&mut daemon), 1);
    assert_eq!(*client.output(), part("client_hello2_hex"));
    assert_eq!(events(&mut daemon, &take(&mut client), 1), ["Ready"]);
    assert_eq!(daemon.clock_ns(), None);
    let mut daemon = Connection::daemon(fixed("key_hex"), fixed("nonce_daemon_hex"));
    events(&mut daemon, &part("client_hello1_hex"), 1);
    assert_eq!(events(&mut daemon, &part("client_hello2_with_clock_hex"), 1), ["Ready"]);
    assert_eq!(daemon.clock_ns(), hello["clock_ns"].as_u64());
    let hello1 = part("daemon_hello_hex");
    assert_eq!(Map::parse(&hello1[HEADER..]).unwrap().bin("proof").unwrap(), part("proof_daemon_hex"));
    let hello2 = part("client_hello2_hex");
    assert_eq!(Map::parse(&hello2[HEADER..]).unwrap().bin("proof").unwrap(), part("proof_client_hex"));
}

#[test]
fn vectors_reject() {
    let reject = vectors("reject.json");
    let reject = reject["reject"].as_array().unwrap();
    assert!(!reject.is_empty());
    for case in reject {
        for size in [1, 7, 1_024] {
            let as_client = match case["role"].as_str().unwrap() {
                "client" => true,
                "daemon" => false,
                other => panic!("role {other}"),
            };
            let mut side = if case["after_hello"].as_bool().unwrap() {
                let (mut client, daemon) = pair();
                if as_client {
                    client.open("sys.info", &info_args());
                    client
                } else {
                    daemon
                }
            } else if as_client {
                Connection::client(KEY, [2; 32])
            } else {
                Connection::daemon(KEY, [3; 32])
            };
            take(&mut side);
            let seen = events(&mut side, &bytes(&case["hex"]), size);
            let last = seen.last().map_or("nothing", String::as_str);
            assert!(last.starts_with("ProtocolError"), "{}: {last}", case["name"]);
            assert!(!last_word(&mut side).is_empty(), "{}", case["name"]);
        }
    }
}

/// Frames that are mostly what a client could send.
fn client_frame() -> impl Strategy<Value = Vec<u8>> {
    let frame = |kind: Kind, stream: u32, payload: Vec<u8>| {
        [&header(kind, stream, payload.len())[..], &payload].concat()
    };
    prop_oneof![
        4 => (0u32..12).prop_map(move |stream| {
            frame(Kind::Open, stream, MapWriter::new(2).str("op", "sys.info").raw("args", &info_args()).done())
        }),
        1 => (0u32..12, 1u64..200).prop_map(move |(stream, length)| {
            frame(Kind::Open, stream, MapWriter::new(2).str("op", "x").uint("args_len", length).done())
        }),
        4 => (0u32..12, 0u8..5, proptest::collection::vec(any::<u8>(), 0..80)).prop_map(
            move |(stream, channel, bytes)| frame(Kind::Data, stream, [&[channel][..], &bytes].concat())
        ),
        2 => (0u32..12, 0u8..5).prop_map(move |(stream, channel)| frame(Kind::Eof, stream, vec![channel])),
        2 => (0u32..12, any::<u32>()).prop_map(move |(stream, n)| {
            frame(Kind::Credit, stream, (n >> 12).to_be_bytes().to_vec())
        }),
        1 => (0u32..12).prop_map(move |stream| {
            frame(Kind::Reset, stream, MapWriter::new(1).str("reason", "r").done())
        }),
        1 => Just(frame(Kind::Ping, 0, vec![0; 8])),
        1 => (0u8..12, 0u32..12, proptest::collection::vec(any::<u8>(), 0..80)).prop_map(
            move |(kind, stream, bytes)| {
                let mut whole = frame(Kind::Ping, stream, bytes);
                whole[4] = kind;
                whole
            }
        ),
    ]
}

proptest! {
    #[test]
    fn one_byte_at_a_time_is_the_same(frames in proptest::collection::vec(client_frame(), 0..40), size in 1usize..400) {
        let bytes = frames.concat();
        let run = |size| {
            let (_, mut daemon) = pair();
            let seen = events(&mut daemon, &bytes, size);
            (seen, take(&mut daemon))
        };
        let whole = run(1_024);
        prop_assert_eq!(&run(1), &whole);
        prop_assert_eq!(&run(size), &whole);
    }

    #[test]
    fn any_bytes_are_survived(bytes in proptest::collection::vec(any::<u8>(), 0..300), early in any::<bool>()) {
        let mut side = if early { Connection::daemon(KEY, [3; 32]) } else { pair().1 };
        events(&mut side, &bytes, 50);
        let _ = Value::Uint(0);
    }
}
