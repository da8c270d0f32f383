//! Commands with a terminal.

use crate::client::{Args, Client, Host, Item, by_id, command, named, running, until};

/// An encoded `{rows, cols}`.
fn size(rows: u64, cols: u64) -> Vec<u8> {
    Args::new().uint("rows", rows).uint("cols", cols).bytes()
}

fn start(client: &mut Client, id: &str, script: &str) -> u32 {
    let stream = client.open("exec.start", &named(id, script).raw("tty", &size(30, 100)));
    client.note(stream);
    stream
}

#[test]
fn a_command_gets_a_terminal_of_its_own() {
    let host = Host::start();
    let mut client = host.connect();
    let script = "tty; stty size; stat -c %u:%a $(tty); [ $(ps -o sid= -p $$) = $$ ] && echo leader; \
                  echo direct > /dev/tty; ps -o tty= -p $$; ls /proc/self/fd | wc -l; echo err >&2";
    let stream = start(&mut client, "t", script);
    let done = client.finish(stream);
    let text = String::from_utf8(done.out).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines[0].starts_with("/dev/pts/"), "{text}");
    assert_eq!(lines[1..5], ["30 100", &format!("{}:620", host.uid), "leader", "direct"], "{text}");
    assert_eq!(format!("/dev/{}", lines[5]), lines[0]);
    assert_eq!(lines[6..], ["4", "err"], "three, that of ls, and all output on one channel: {text}");
    assert!(done.err.is_empty() && text.contains("\r\n"));
    assert_eq!(done.end.int("code"), Some(0));
    let exec = crate::client::entries(&client.call("exec.list", &Args::new()).out).remove(0);
    assert_eq!(exec.get("tty"), Some(&Item::Bool(true)));
    for bad in [size(0, 80), size(24, 65_536), Args::new().uint("rows", 1).bytes(), Args::new().bytes()] {
        let args = command(&[b"true"], 1_000).raw("tty", &bad);
        assert_eq!(client.call("exec.start", &args).end.error(), "invalid_request");
    }
    let anonymous = command(&[b"tty"], 5_000).raw("tty", &size(1, 1));
    assert!(client.call("exec.start", &anonymous).out.starts_with(b"/dev/pts/"), "also without an id");
}

#[test]
fn a_resize_is_seen_and_signalled() {
    let host = Host::start();
    let mut client = host.connect();
    let script = "trap 'stty size; exit 5' WINCH; echo ready; while :; do sleep 0.05; done";
    let stream = start(&mut client, "w", script);
    client.output_with(stream, "ready");
    let args = by_id("w").uint("rows", 50).uint("cols", 132);
    assert_eq!(host.connect().call("exec.resize", &args).end.error(), "");
    let done = client.finish(stream);
    assert_eq!((&done.out[..], done.end.int("code")), (&b"50 132\r\n"[..], Some(5)));
    assert_eq!(client.call("exec.resize", &args).end.error(), "not_found");
    assert_eq!(
        client.call("exec.resize", &by_id("w").uint("rows", 0).uint("cols", 1)).end.error(),
        "invalid_request"
    );
    client.call("exec.start", &named("plain", "sleep 5").bool("detach", true));
    let args = by_id("plain").uint("rows", 50).uint("cols", 132);
    assert_eq!(client.call("exec.resize", &args).end.error(), "invalid_request");
}

#[test]
fn typing_edits_interrupts_and_ends() {
    let host = Host::start();
    let mut client = host.connect();
    let stream = start(&mut client, "sh", "exec sh -i");
    client.upload(stream, 0, b"echo $((40+2))\n");
    client.output_with(stream, "42");
    client.upload(stream, 0, b"sleep 7771\n");
    until("it runs", || running("sleep 7771") == 1);
    client.upload(stream, 0, b"\x03");
    until("byte 3 interrupts the foreground", || running("sleep 7771") == 0);
    client.upload(stream, 0, b"echo status $?\n");
    client.output_with(stream, "status 130");
    client.upload(stream, 0, b"cat\n");
    until("cat runs", || running("cat") >= 1);
    client.upload(stream, 0, b"typed\n\x04");
    client.output_with(stream, "typed\r\ntyped");
    // The end of the stream's input is one more end-of-file character, for the shell.
    client.eof(stream);
    let end = client.finish(stream).end;
    assert!(end.int("code").is_some(), "{end:?}");
}

#[test]
fn a_full_screen_program_gets_every_byte_as_it_is() {
    let host = Host::start();
    let mut client = host.connect();
    let stream = start(&mut client, "raw", "stty raw -echo; echo ready; head -c 5 | od -An -tx1; stty size");
    client.output_with(stream, "ready");
    client.upload(stream, 0, b"\x03\x04\r\x1b[");
    let done = client.finish(stream);
    assert!(
        String::from_utf8_lossy(&done.out).contains("03 04 0d 1b 5b"),
        "{:?}",
        String::from_utf8_lossy(&done.out)
    );
}

#[test]
fn a_terminal_lives_without_its_client_and_takes_large_output() {
    let host = Host::start();
    let mut client = host.connect();
    let script = "seq 20000; read line; echo got $line; sleep 7772 & exit 4";
    let args = named("d", script).raw("tty", &size(24, 80)).bool("detach", true);
    assert!(client.call("exec.start", &args).end.int("pid").is_some());
    let end = client.put("exec.stdin", &by_id("d"), b"hello\n");
    assert_eq!(end.int("taken"), Some(6));
    let done = client.call("exec.attach", &by_id("d"));
    let text = String::from_utf8(done.out).unwrap();
    assert!(
        text.contains("19999\r\n20000\r\n") && text.ends_with("got hello\r\n"),
        "{:?}",
        &text[text.len() - 50..]
    );
    assert_eq!(done.end.get("exit").unwrap().int("code"), Some(4));
    // What the session leaves is hung up, and nothing of it stays.
    until("nothing is left", || host.is_at_rest() || running("sleep 7772") == 1);
}

#[test]
fn input_that_nobody_reads_waits_and_the_deadline_holds() {
    let host = Host::start();
    let mut client = host.connect();
    let args = command(&[b"sh", b"-c", b"stty raw -echo; echo ready; sleep 7773"], 1_000);
    let stream = client.open("exec.start", &args.raw("tty", &size(24, 80)));
    client.output_with(stream, "ready");
    client.upload(stream, 0, &[b'x'; 200_000]);
    let end = client.finish(stream).end;
    assert_eq!(end.get("timed_out"), Some(&Item::Bool(true)));
    assert_eq!(running("sleep 7773"), 0);
}
