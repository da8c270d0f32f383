//! Standard input of commands: from the starter, from others, its end, and those who never read.

use crate::client::{Args, Host, Item, WINDOW, by_id, command, named, running};
use std::time::{Duration, Instant};

fn fed(id: &str, script: &str) -> Args {
    named(id, script).bool("stdin", true)
}

#[test]
fn bytes_go_through_and_their_end_is_seen() {
    let host = Host::start();
    let mut client = host.connect();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|n| (n ^ n >> 8) as u8).collect();
    let id = client.open("exec.start", &command(&[b"cat"], 20_000).bool("stdin", true));
    // Output has to be taken meanwhile, else the command rightly stops reading.
    let mut out = Vec::new();
    for part in bytes.chunks(50_000) {
        client.send(3, id, &[&[0], part].concat());
        while out.len() < part.len() {
            match client.next_of(id) {
                (3, _, payload) => {
                    out.extend_from_slice(&payload[1..]);
                    client.credit(id, payload.len() as u32);
                }
                (5, ..) => {}
                other => panic!("{other:?}"),
            }
        }
        assert!(out == part);
        out.clear();
    }
    client.eof(id);
    let done = client.finish(id);
    assert_eq!((done.out.len(), done.end.int("code")), (0, Some(0)));
    let id = client
        .open("exec.start", &command(&[b"sh", b"-c", b"wc -c; cat /dev/stdin"], 20_000).bool("stdin", true));
    client.upload(id, 0, b"12345");
    client.eof(id);
    assert_eq!(client.finish(id).out, b"5\n");
    assert_eq!(
        client.shell("echo x > /dev/stderr; echo y > /dev/stdout").err,
        b"x\n",
        "its pipes are its own"
    );
    assert_eq!(client.shell("wc -c").out, b"0\n", "without stdin there is none");
}

#[test]
fn a_command_that_never_reads_takes_one_window_and_meets_its_deadline() {
    let host = Host::start();
    let mut client = host.connect();
    let before = host.status("VmRSS:");
    let start = Instant::now();
    let args = command(&[b"sleep", b"7751"], 3_000).bool("stdin", true);
    let id = client.open("exec.start", &args);
    let mut sent = 0;
    let piece = [&[0u8][..], &[7; 65_535]].concat();
    let mut credit = WINDOW as usize;
    while credit >= piece.len() {
        client.send(3, id, &piece);
        credit -= piece.len();
        sent += piece.len();
    }
    assert_eq!(sent, WINDOW as usize);
    std::thread::sleep(Duration::from_millis(200));
    client.send(8, 0, b"12345678");
    assert_eq!(
        client.receive().unwrap().0,
        9,
        "less than half a window fits into the pipe: no credit, no END"
    );
    assert!(host.status("VmRSS:") < before + 1_000);
    let end = client.finish(id).end;
    assert_eq!(end.get("timed_out"), Some(&Item::Bool(true)));
    assert!(start.elapsed() < Duration::from_secs(60));
    assert_eq!(running("sleep 7751"), 0);
}

#[test]
fn who_sends_blindly_to_one_that_reads_no_more_is_not_held() {
    let host = Host::start();
    let mut client = host.connect();
    let id = client.open(
        "exec.start",
        &command(&[b"sh", b"-c", b"exec <&-; sleep 0.5; echo done"], 20_000).bool("stdin", true),
    );
    assert!(client.upload(id, 0, &[1; 1_000_000]), "all of it goes before the end");
    client.eof(id);
    let done = client.finish(id);
    assert_eq!((&done.out[..], done.end.int("code")), (&b"done\n"[..], Some(0)));
}

#[test]
fn another_connection_writes_and_closes() {
    let host = Host::start();
    let mut client = host.connect();
    let id = client.open("exec.start", &fed("reader", "while read line; do echo got $line; done; echo end"));
    client.note(id);
    client.upload(id, 0, b"first\n");
    client.output_with(id, "got first");
    let mut other = host.connect();
    let end = other.put("exec.stdin", &by_id("reader"), b"second\n");
    assert_eq!(end.int("taken"), Some(7));
    client.output_with(id, "got second");
    client.upload(id, 0, b"third\n");
    client.output_with(id, "got third");
    assert_eq!(other.call("exec.close", &by_id("reader")).end.error(), "");
    let done = client.finish(id);
    assert_eq!((&done.out[..], done.end.int("code")), (&b"end\n"[..], Some(0)));
    for _ in 0..2 {
        assert_eq!(other.put("exec.stdin", &by_id("reader"), b"late").error(), "not_found");
        assert_eq!(other.call("exec.close", &by_id("reader")).end.error(), "not_found");
    }
}

#[test]
fn a_command_that_ends_between_two_pieces_has_taken_the_first() {
    let host = Host::start();
    let mut client = host.connect();
    client.call("exec.start", &fed("once", "read -r line; echo got $line").bool("detach", true));
    let id = client.open("exec.stdin", &by_id("once"));
    client.upload(id, 0, b"now\n");
    assert_eq!(client.finish(id).end.int("taken"), Some(4));
    assert_eq!(client.call("exec.attach", &by_id("once")).out, b"got now\n");
    // One that brought nothing is told that there is nobody.
    client.call("exec.start", &fed("none", "sleep 60").bool("detach", true));
    let id = client.open("exec.stdin", &by_id("none"));
    client.call("exec.forget", &by_id("none"));
    assert_eq!(client.finish(id).end.error(), "not_found");
}

#[test]
fn a_close_waits_for_what_was_sent_before_and_takes_nothing_more() {
    let host = Host::start();
    let mut client = host.connect();
    let go = host.file("go");
    let script = format!("while ! [ -e {} ]; do sleep 0.01; done; wc -c", go.display());
    client.call("exec.start", &fed("slow", &script).bool("detach", true));
    let id = client.open("exec.stdin", &by_id("slow"));
    client.upload(id, 0, &[1; 200_000]);
    assert_eq!(client.call("exec.close", &by_id("slow")).end.error(), "");
    client.send(3, id, &[0; 1_001]);
    assert_eq!(client.put("exec.stdin", &by_id("slow"), b"late").error(), "not_found");
    std::fs::write(&go, b"").unwrap();
    assert_eq!(client.finish(id).end.int("taken"), Some(200_000));
    assert_eq!(client.call("exec.attach", &by_id("slow")).out, b"200000\n");
}

#[test]
fn input_survives_the_connection_that_sent_it() {
    let host = Host::start();
    let mut client = host.connect();
    let script = "sleep 0.3; head -c 100000 | wc -c; cat";
    let id = client.open("exec.start", &fed("left", script));
    client.note(id);
    client.upload(id, 0, &[1; 100_000]);
    client.send(8, 0, b"12345678");
    while client.receive().unwrap().0 != 9 {}
    drop(client);
    let mut client = host.connect();
    assert_eq!(client.put("exec.stdin", &by_id("left"), b"more").int("taken"), Some(4));
    client.call("exec.close", &by_id("left"));
    assert_eq!(client.call("exec.attach", &by_id("left")).out, b"100000\nmore");
    // Without an id nobody can write any more, so that is the end.
    let script = format!("cat > {0}.part; mv {0}.part {0}", host.file("whole").display());
    let id =
        client.open("exec.start", &command(&[b"sh", b"-c", script.as_bytes()], 20_000).bool("stdin", true));
    client.upload(id, 0, b"all of it");
    client.call("sys.info", &Args::new());
    drop(client);
    crate::client::until("it has ended", || host.file("whole").exists());
    assert_eq!(std::fs::read(host.file("whole")).unwrap(), b"all of it");
}

#[test]
fn writers_are_few_and_a_reset_frees_its_place() {
    let host = Host::start();
    let mut client = host.connect();
    client.call("exec.start", &fed("deaf", "sleep 60").bool("detach", true));
    let writers: Vec<_> = (0..16)
        .map(|_| {
            let id = client.open("exec.stdin", &by_id("deaf"));
            client.upload(id, 0, &[1; 100_000]);
            id
        })
        .collect();
    assert_eq!(client.call("exec.stdin", &by_id("deaf")).end.error(), "exhausted");
    client.reset(writers[3]);
    let id = client.open("exec.stdin", &by_id("deaf"));
    client.call("exec.forget", &by_id("deaf"));
    assert_eq!(client.finish(id).end.error(), "not_found");
    assert_eq!(client.finish(writers[0]).end.error(), "not_found");
}
