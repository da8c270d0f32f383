//! Hellos, limits, last words.

use crate::client::{Args, Host, Item, path};
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::time::{Duration, Instant};

#[test]
fn it_says_who_it_is() {
    let host = Host::start();
    let end = host.connect().call("sys.info", &Args::new()).end;
    assert_eq!(end.text("version"), Some(env!("CARGO_PKG_VERSION")));
    assert_eq!(end.int("pid"), Some(host.child.id().into()));
    assert_eq!(
        (end.int("uid"), end.int("gid"), end.int("execs")),
        (Some(host.uid.into()), Some(host.uid.into()), Some(0))
    );
    assert_eq!(host.status("Threads:"), 7, "all threads are there from the start");
}

#[test]
fn it_binds_a_path_and_goes_when_told() {
    let mut host = Host::start_by_path();
    let mode = std::fs::metadata(&host.socket).unwrap();
    assert!(mode.file_type().is_socket());
    assert_eq!(mode.permissions().mode() & 0o777, 0o600);
    let mut client = host.connect();
    assert_eq!(client.call("sys.info", &Args::new()).end.error(), "");
    let pid = rustix::process::Pid::from_raw(host.child.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(client.last_word(), "shutdown");
    assert_eq!(host.child.wait().unwrap().code(), Some(0));
    assert!(!host.socket.exists());
}

fn usr1(host: &Host) {
    let pid = rustix::process::Pid::from_raw(host.child.id() as i32).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::USR1).unwrap();
}

/// What `spec/wire.md` says of `sys.prepare-checkpoint`, twice over, and with another key the second time.
#[test]
fn it_closes_its_sockets_for_a_checkpoint_and_binds_again_when_told() {
    let host = Host::start_by_path();
    let mut client = host.connect();
    let start = crate::client::named("a", "sleep 7762").bool("detach", true);
    assert_eq!(client.call("exec.start", &start).end.error(), "");
    usr1(&host);
    let mut key = crate::client::KEY;
    for round in 0..2u8 {
        let mut other = host.knock();
        other.hello_to(&key, &key);
        let id = client.open("sys.prepare-checkpoint", &Args::new());
        assert_eq!(client.finish(id).end, Item::Map(std::collections::HashMap::new()));
        assert_eq!(client.last_word(), "checkpoint");
        assert_eq!(other.last_word(), "checkpoint");
        assert!(!host.socket.exists());
        let sockets = || {
            let open = std::fs::read_dir(format!("/proc/{}/fd", host.child.id())).unwrap();
            let links = open.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok());
            let numbers: Vec<_> = links
                .filter_map(|link| {
                    Some(link.to_str()?.strip_prefix("socket:[")?.trim_end_matches(']').to_string())
                })
                .collect();
            let table = std::fs::read_to_string("/proc/net/unix").unwrap();
            table
                .lines()
                .filter(|line| line.contains("/") && numbers.iter().any(|n| line.contains(n)))
                .count()
        };
        assert_eq!(sockets(), 0, "nothing of the daemon's has a name");
        key = [round + 100; 32];
        host.configure(&key);
        usr1(&host);
        crate::client::until("it listens again", || host.socket.exists());
        assert_eq!(std::fs::metadata(&host.socket).unwrap().permissions().mode() & 0o777, 0o600);
        client = host.knock();
        client.hello_to(&key, &key);
        let status = client.call("exec.status", &Args::new().str("id", "a")).end;
        assert_eq!(status.get("exec").and_then(|exec| exec.get("running")), Some(&Item::Bool(true)));
        let mut old = host.knock();
        old.hello_to(&key, &[0; 32]);
        assert_eq!(old.last_word(), "unauthorized");
    }
}

/// A checkpoint may be resumed long after it was taken: that is not the command's time.
#[test]
fn the_time_of_a_checkpoint_counts_for_no_deadline() {
    let (timeout, absence) = (Duration::from_secs(5), Duration::from_secs(2));
    let host = Host::start_by_path();
    let mut client = host.connect();
    let begun = Instant::now();
    let start = crate::client::command(&[b"sleep", b"7763"], 5_000).str("id", "a").bool("detach", true);
    assert_eq!(client.call("exec.start", &start).end.error(), "");
    let id = client.open("sys.prepare-checkpoint", &Args::new());
    client.finish(id);
    assert_eq!(client.last_word(), "checkpoint");
    std::thread::sleep(absence);
    usr1(&host);
    crate::client::until("it listens again", || host.socket.exists());
    let mut client = host.connect();
    let end = client.call("exec.attach", &Args::new().str("id", "a")).end;
    let lasted = begun.elapsed();
    assert!(lasted >= timeout + absence);
    let exit = end.get("exit").unwrap();
    assert_eq!(exit.get("timed_out"), Some(&Item::Bool(true)));
    let wall = Duration::from_micros(exit.int("wall_us").unwrap() as u64);
    assert!(timeout <= wall && wall + absence <= lasted);
}

#[test]
fn a_socket_that_was_handed_in_cannot_be_made_again() {
    let host = Host::start();
    let mut client = host.connect();
    assert_eq!(client.call("sys.prepare-checkpoint", &Args::new()).end.error(), "unsupported");
    assert_eq!(client.call("sys.info", &Args::new()).end.error(), "");
}

#[test]
fn what_is_a_machines_is_nobody_elses() {
    let host = Host::start();
    let mut client = host.connect();
    for op in ["sys.freeze", "sys.thaw"] {
        assert_eq!(client.call(op, &Args::new()).end.error(), "unsupported");
    }
    assert_eq!(client.call("sys.info", &Args::new()).end.error(), "");
}

#[test]
fn a_wrong_key_is_refused() {
    let host = Host::start();
    let mut client = host.knock();
    client.hello(&[0; 32]);
    assert_eq!(client.last_word(), "unauthorized");
}

#[test]
fn a_request_before_the_hello_is_refused() {
    let host = Host::start();
    let mut client = host.knock();
    client.open("sys.info", &Args::new());
    assert_eq!(client.last_word(), "protocol");
}

#[test]
fn frames_may_follow_the_proof_at_once() {
    let host = Host::start();
    let mut client = host.connect();
    for _ in 0..3 {
        client.open("sys.info", &Args::new());
    }
    for id in [5, 1, 3] {
        assert_eq!(client.finish(id).end.error(), "");
    }
}

#[test]
fn strangers_are_few_and_the_oldest_goes() {
    let host = Host::start();
    let mut strangers: Vec<_> = (0..16).map(|_| host.knock()).collect();
    std::thread::sleep(Duration::from_millis(100));
    strangers.push(host.knock());
    assert_eq!(strangers[0].last_word(), "too_many");
    let mut client = host.connect();
    assert_eq!(client.call("sys.info", &Args::new()).end.error(), "");
    assert_eq!(strangers[1].last_word(), "too_many", "the client's own arrival was one more");
}

#[test]
fn a_stranger_has_ten_seconds() {
    let host = Host::start();
    let start = Instant::now();
    assert_eq!(host.knock().last_word(), "unauthorized");
    assert!((9..13).contains(&start.elapsed().as_secs()));
}

#[test]
fn a_protocol_error_ends_its_connection_alone() {
    let host = Host::start();
    let (mut good, mut bad) = (host.connect(), host.connect());
    let id = bad.start("sleep 0.3; echo survived > $0 ", 100_000);
    bad.reset(id);
    let script = format!("sleep 0.3; echo survived > {}", host.file("mark").display());
    bad.start(&script, 100_000);
    assert_eq!(good.call("sys.info", &Args::new()).end.error(), "");
    bad.send(99, 0, b"");
    assert_eq!(bad.last_word(), "protocol");
    assert_eq!(good.call("sys.info", &Args::new()).end.error(), "");
    let mark = || std::fs::read_to_string(host.file("mark")).unwrap_or_default();
    crate::client::until("it goes on", || mark() == "survived\n");
}

#[test]
fn unknown_and_wrong_requests_are_typed() {
    let host = Host::start();
    let mut client = host.connect();
    assert_eq!(client.call("fs.shred", &Args::new()).end.error(), "unsupported");
    for (op, args) in [
        ("fs.list", Args::new()),
        ("fs.list", path("relative")),
        ("fs.list", path("/a\0b")),
        ("fs.list", path([b'/'; 4_096])),
        ("fs.list", Args::new().str("path", "/")),
        ("fs.write", path("/x")),
        ("fs.write", path("/x").uint("mode", 0o10000)),
        ("fs.stat", path("/").uint("follow", 1)),
        ("fs.read", path("/").bin("offset", "1")),
        ("tar.export", Args::new()),
        ("exec.start", Args::new()),
    ] {
        assert_eq!(client.call(op, &args).end.error(), "invalid_request", "{op}");
    }
}

#[test]
fn a_ping_passes_a_blocked_stream() {
    let host = Host::start();
    let mut client = host.connect();
    let id = client.start("yes", 100_000);
    let mut taken = 0;
    while taken < 262_144 {
        let (kind, stream, payload) = client.receive().unwrap();
        assert_eq!((kind, stream), (3, id));
        taken += payload.len();
    }
    assert_eq!(taken, 262_144, "not a byte above the credit");
    let before = host.status("VmRSS:");
    std::thread::sleep(Duration::from_millis(300));
    client.send(8, 0, b"12345678");
    assert_eq!(client.receive().unwrap(), (9, 0, b"12345678".to_vec()));
    assert_eq!(client.call("fs.stat", &path("/")).end.error(), "");
    assert!(host.status("VmRSS:") < before + 500, "memory stays flat");
    client.reset(id);
    let end = client.call("sys.info", &Args::new()).end;
    assert!(matches!(end.get("uptime_ms"), Some(Item::Int(_))));
}
