//! Commands as objects: rings and cursors, attach, list, detach, signals, forget.

use crate::client::{Args, Client, Done, Host, Item, by_id, command, entries, named, running, until};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::time::{Duration, Instant};

const MIB: usize = 1 << 20;

fn describe(client: &mut Client, id: &str) -> Item {
    let done = client.call("exec.list", &Args::new());
    let all = entries(&done.out);
    assert_eq!(done.end.int("count"), Some(all.len() as i64));
    all.into_iter().find(|exec| exec.text("id") == Some(id)).unwrap()
}

fn detach(client: &mut Client, id: &str, script: &str) -> i64 {
    let end = client.call("exec.start", &named(id, script).bool("detach", true)).end;
    assert_eq!(end.text("id"), Some(id), "{end:?}");
    end.int("pid").unwrap()
}

fn attach(client: &mut Client, id: &str, cursor: u64) -> Done {
    client.call("exec.attach", &by_id(id).uint("cursor", cursor))
}

#[test]
fn a_detached_command_outlives_its_connection_and_is_read_later() {
    let host = Host::start();
    let mut client = host.connect();
    let mark = host.file("go");
    let script =
        format!("echo one; echo two >&2; while ! [ -e {} ]; do sleep 0.01; done; exit 3", mark.display());
    let pid = detach(&mut client, "job", &script);
    assert!(fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap().starts_with("sh"));
    drop(client);
    let mut client = host.connect();
    let exec = describe(&mut client, "job");
    assert_eq!((exec.get("running"), exec.int("pid")), (Some(&Item::Bool(true)), Some(pid)));
    assert_eq!((exec.get("tty"), exec.get("exit")), (Some(&Item::Bool(false)), None));
    let Some(Item::Array(argv)) = exec.get("argv") else { panic!("{exec:?}") };
    assert_eq!(argv[..2], [Item::Bin(b"sh".to_vec()), Item::Bin(b"-c".to_vec())]);
    let follow = client.open("exec.attach", &by_id("job"));
    assert_eq!(client.output_with(follow, "two"), "one\ntwo\n");
    let done = client.call("exec.attach", &by_id("job").bool("follow", false));
    assert_eq!(
        (&done.out[..], &done.err[..], done.end.int("cursor")),
        (&b"one\n"[..], &b"two\n"[..], Some(8))
    );
    assert_eq!(done.end.get("exit"), None, "it runs");
    fs::write(mark, b"").unwrap();
    let end = client.finish(follow).end;
    assert_eq!((end.get("exit").unwrap().int("code"), end.int("cursor")), (Some(3), Some(8)));
    let done = attach(&mut client, "job", 5);
    assert_eq!((&done.out[..], &done.err[..], done.notes.len()), (&b""[..], &b"wo\n"[..], 0));
    assert_eq!(attach(&mut client, "job", 9).end.error(), "invalid_request");
    let exec = describe(&mut client, "job");
    assert_eq!((exec.get("running"), exec.int("cursor")), (Some(&Item::Bool(false)), Some(8)));
    assert_eq!(exec.get("exit").unwrap().int("code"), Some(3));
}

#[test]
fn a_named_command_is_announced_and_its_name_is_its_own() {
    let host = Host::start();
    let mut client = host.connect();
    let id = client.open("exec.start", &named("a-1", "sleep 0.2; echo out").str("tag", "mine"));
    let note = client.note(id);
    assert_eq!(note.get("started"), Some(&Item::Bool(true)));
    assert!(note.int("pid").unwrap() > 1);
    assert_eq!(client.call("exec.start", &named("a-1", "true")).end.error(), "conflict");
    assert_eq!(describe(&mut client, "a-1").text("tag"), Some("mine"));
    let done = client.finish(id);
    assert_eq!((&done.out[..], done.end.int("code")), (&b"out\n"[..], Some(0)));
    assert_eq!(attach(&mut client, "a-1", 0).out, b"out\n");
    assert_eq!(
        client.call("exec.start", &named("a-1", "true")).end.error(),
        "conflict",
        "also after its end"
    );
    assert_eq!(client.call("exec.forget", &by_id("a-1")).end.error(), "");
    assert_eq!(client.call("exec.forget", &by_id("a-1")).end.error(), "not_found");
    assert_eq!(client.call("exec.start", &named("a-1", "true")).end.int("code"), Some(0));
    for id in ["", "A", "a_b", "é", &"x".repeat(65)] {
        assert_eq!(client.call("exec.start", &named(id, "true")).end.error(), "invalid_request", "{id:?}");
        assert_eq!(client.call("exec.attach", &by_id(id)).end.error(), "invalid_request", "{id:?}");
    }
    let anonymous = command(&[b"true"], 1_000).bool("detach", true);
    assert_eq!(client.call("exec.start", &anonymous).end.error(), "invalid_request");
    for op in ["exec.attach", "exec.stdin", "exec.close", "exec.forget"] {
        assert_eq!(client.call(op, &by_id("nobody")).end.error(), "not_found", "{op}");
    }
}

#[test]
fn a_command_killed_for_want_of_memory_says_so_however_late_it_is_asked() {
    let host = Host::start();
    let mut client = host.connect();
    let said = |client: &mut Client, id: &str| {
        let attached = attach(client, id, 0).end.get("exit").unwrap().get("oom_killed").cloned();
        assert_eq!(describe(client, id).get("exit").unwrap().get("oom_killed").cloned(), attached);
        attached
    };
    // What the kernel does: it raises the count, then the process dies of SIGKILL.
    let (yes, no) = (Some(Item::Bool(true)), Some(Item::Bool(false)));
    let started =
        client.open("exec.start", &named("itself", "echo go; read x; kill -9 $$").bool("stdin", true));
    client.output_with(started, "go");
    host.killed_for_memory("low 0\nhigh 0\nmax 9\noom 1\noom_kill 1\noom_group_kill 0\n");
    client.eof(started);
    assert_eq!(client.finish(started).end.get("oom_killed").cloned(), yes);
    detach(&mut client, "another", "kill -9 $$");
    assert_eq!(said(&mut client, "another"), no, "the kill before it was not its own");
    let mark = host.file("go");
    let script =
        format!("while ! [ -e {} ]; do sleep 0.01; done; sh -c 'kill -9 $$'; exit $?", mark.display());
    detach(&mut client, "child", &script);
    // The older form of the count, memory.oom_control.
    host.killed_for_memory("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n");
    fs::write(mark, b"").unwrap();
    assert_eq!(said(&mut client, "child"), yes, "a shell passes its child's end on as 137");
    assert_eq!(said(&mut client, "itself"), yes, "later kills change nothing");
    detach(&mut client, "well", "exit 3");
    assert_eq!(said(&mut client, "well"), None, "only a kill has a cause");
    host.killed_for_memory("oom_kill_disable 0\nunder_oom 0\n");
    detach(&mut client, "uncounted", "kill -9 $$");
    assert_eq!(said(&mut client, "uncounted"), None, "nobody counts");
}

#[test]
fn one_command_is_described_as_their_list_does() {
    let host = Host::start();
    let mut client = host.connect();
    detach(&mut client, "runs", "sleep 20");
    client.call("exec.start", &named("ended", "echo out; exit 4").str("tag", "mine"));
    client.call("exec.start", &command(&[b"no-such-program"], 5_000).str("id", "missing"));
    for id in ["runs", "ended", "missing"] {
        let status = client.call("exec.status", &by_id(id));
        assert_eq!((status.end.get("exec"), status.out.len()), (Some(&describe(&mut client, id)), 0));
    }
    assert_eq!(client.call("exec.status", &by_id("nobody")).end.error(), "not_found");
    assert_eq!(client.call("exec.status", &by_id("A")).end.error(), "invalid_request");
    assert_eq!(client.call("exec.status", &Args::new()).end.error(), "invalid_request");
}

#[test]
fn what_did_not_start_is_kept_only_with_an_exit() {
    let host = Host::start();
    let mut client = host.connect();
    let missing = command(&[b"no-such-program"], 5_000).str("id", "missing");
    let done = client.call("exec.start", &missing.bool("detach", true));
    assert_eq!(done.end.int("code"), Some(127));
    assert_eq!(describe(&mut client, "missing").get("exit").unwrap().int("code"), Some(127));
    let nowhere = Args::new()
        .bins("argv", &[b"true"])
        .pairs("env", &[])
        .bin("cwd", "/missing")
        .uint("timeout_ms", 1_000)
        .str("id", "nowhere");
    let done = client.call("exec.start", &nowhere);
    assert_eq!((done.end.error(), done.notes.len()), ("workdir", 0));
    assert_eq!(client.call("exec.attach", &by_id("nowhere")).end.error(), "not_found");
}

#[test]
fn a_ring_keeps_the_newest_mebibyte_and_says_what_is_missing() {
    let host = Host::start();
    let mut client = host.connect();
    let script = "i=0; while [ $i -lt 300000 ]; do echo line $i; i=$((i+1)); done";
    let done = client.call("exec.start", &named("long", script));
    let total = done.out.len();
    assert!(total > 2 * MIB, "the starter gets every byte: {total}");
    let read = attach(&mut client, "long", 0);
    assert_eq!(read.notes.len(), 1);
    assert_eq!(read.notes[0].int("gap"), Some((total - MIB) as i64));
    assert!(read.out == done.out[total - MIB..]);
    assert_eq!(read.end.int("cursor"), Some(total as i64));
    let exec = describe(&mut client, "long");
    assert_eq!((exec.int("first"), exec.int("cursor")), (Some((total - MIB) as i64), Some(total as i64)));
    let read = attach(&mut client, "long", (total - 10) as u64);
    assert!(read.out == done.out[total - 10..] && read.notes.is_empty());
}

#[test]
fn a_slow_reader_of_the_ring_loses_and_holds_nobody_back() {
    let host = Host::start();
    let mut client = host.connect();
    detach(&mut client, "flood", "head -c 20000000 /dev/zero; echo end");
    let slow = client.open("exec.attach", &by_id("flood"));
    until("it ends although nobody takes its output", || {
        describe(&mut host.connect(), "flood").get("running") == Some(&Item::Bool(false))
    });
    let done = client.finish(slow);
    let gaps: i64 = done.notes.iter().map(|note| note.int("gap").unwrap()).sum();
    assert!(gaps > 0);
    assert_eq!(done.out.len() as i64 + gaps, 20_000_004);
    assert!(done.out.ends_with(b"end\n"));
    assert_eq!(done.end.int("cursor"), Some(20_000_004));
}

#[test]
fn cursors_count_both_channels_in_their_order() {
    let host = Host::start();
    let mut client = host.connect();
    let script = "for i in 1 2 3; do echo out$i; sleep 0.02; echo err$i >&2; sleep 0.02; done";
    let done = client.call("exec.start", &named("both", script));
    assert_eq!((&done.out[..], &done.err[..]), (&b"out1\nout2\nout3\n"[..], &b"err1\nerr2\nerr3\n"[..]));
    let all = b"out1\nerr1\nout2\nerr2\nout3\nerr3\n";
    for cursor in 0..=all.len() {
        let id = client.open("exec.attach", &by_id("both").uint("cursor", cursor as u64));
        let mut seen = Vec::new();
        let end = loop {
            match client.next_of(id) {
                (3, _, payload) => {
                    let name: &[u8] = if payload[0] == 1 { b"out" } else { b"err" };
                    let at = cursor + seen.len();
                    assert_eq!(&all[at / 5 * 5..at / 5 * 5 + 3], name, "the channel at {at}");
                    seen.extend_from_slice(&payload[1..]);
                }
                (6, _, payload) => break Item::decode(&mut &payload[..]),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(seen, all[cursor..]);
        assert_eq!(end.int("cursor"), Some(30));
    }
}

#[test]
fn the_sandbox_keeps_eight_mebibytes_and_the_ended_give_first() {
    let host = Host::start();
    let mut client = host.connect();
    let mib = "head -c 1048576 /dev/zero";
    detach(&mut client, "old-running", &format!("{mib}; sleep 60"));
    until("its ring is full", || {
        describe(&mut host.connect(), "old-running").int("cursor") == Some(MIB as i64)
    });
    for n in 0..7 {
        client.call("exec.start", &named(&format!("ended-{n}"), mib));
    }
    let held = |client: &mut Client, id: &str| {
        let exec = describe(client, id);
        exec.int("cursor").unwrap() - exec.int("first").unwrap()
    };
    assert_eq!(client.call("sys.stats", &Args::new()).end.int("ring_bytes"), Some(8 * MIB as i64));
    client.call("exec.start", &named("new", "head -c 600000 /dev/zero"));
    assert_eq!(held(&mut client, "ended-0"), MIB as i64 - 600_000);
    assert_eq!(held(&mut client, "old-running"), MIB as i64);
    for n in 0..7 {
        let id = format!("running-{n}");
        detach(&mut client, &id, &format!("{mib}; sleep 60"));
        until("all is read", || describe(&mut host.connect(), &id).int("cursor") == Some(MIB as i64));
    }
    detach(&mut client, "last", "head -c 500000 /dev/zero; sleep 60");
    until("all is read", || describe(&mut host.connect(), "last").int("cursor") == Some(500_000));
    assert_eq!(held(&mut client, "new"), 0);
    assert_eq!(held(&mut client, "old-running"), MIB as i64 - 500_000);
    let stats = client.call("sys.stats", &Args::new()).end;
    assert_eq!(stats.int("ring_bytes"), Some(8 * MIB as i64));
    assert_eq!(stats.int("execs"), Some(17));
    // Without the program itself, which is larger where it is made for debugging.
    assert!(host.status("RssAnon:") < 12_000, "rings cost an eighth more than what they hold");
    client.call("exec.forget", &by_id("running-3"));
    assert_eq!(client.call("sys.stats", &Args::new()).end.int("ring_bytes"), Some(7 * MIB as i64));
}

#[test]
fn a_thousand_statuses_are_kept() {
    let host = Host::start();
    let mut client = host.connect();
    detach(&mut client, "runs", "sleep 60");
    for n in 0..1_003 {
        let args = command(&[b"true"], 5_000).str("id", &format!("n-{n}"));
        assert_eq!(client.call("exec.start", &args).end.int("code"), Some(0));
    }
    let done = client.call("exec.list", &Args::new());
    assert_eq!(done.end.int("count"), Some(1_001));
    let all = entries(&done.out);
    assert_eq!((all[0].text("id"), all[1_000].text("id")), (Some("n-3"), Some("runs")));
    assert_eq!(client.call("exec.attach", &by_id("n-2")).end.error(), "not_found");
}

#[test]
fn a_lost_connection_leaves_a_named_command_to_its_ring() {
    let host = Host::start();
    let mut client = host.connect();
    let id =
        client.open("exec.start", &named("kept", "head -c 600000 /dev/zero; echo end; sleep 0.2; exit 9"));
    client.note(id);
    drop(client);
    let mut client = host.connect();
    let done = attach(&mut client, "kept", 0);
    assert_eq!((done.out.len(), done.notes.len()), (600_004, 0));
    assert_eq!(done.end.get("exit").unwrap().int("code"), Some(9));
}

#[test]
fn the_deadline_holds_for_the_detached() {
    let host = Host::start();
    let mut client = host.connect();
    let args = command(&[b"sh", b"-c", b"setsid sleep 7741 & sleep 7741"], 400).str("id", "late");
    let start = Instant::now();
    client.call("exec.start", &args.bool("detach", true));
    let end = attach(&mut client, "late", 0).end;
    assert!((400..2_000).contains(&start.elapsed().as_millis()));
    let exit = end.get("exit").unwrap();
    assert_eq!((exit.get("timed_out"), exit.int("signal")), (Some(&Item::Bool(true)), Some(9)));
    assert_eq!(running("sleep 7741"), 0);
}

#[test]
fn resets_end_the_command_of_the_starter_alone() {
    let host = Host::start();
    let mut client = host.connect();
    let starter = client.open("exec.start", &named("reset", "echo on; sleep 7742"));
    client.note(starter);
    client.output_with(starter, "on");
    let reader = client.open("exec.attach", &by_id("reset"));
    client.output_with(reader, "on");
    client.reset(reader);
    let reader = client.open("exec.attach", &by_id("reset"));
    client.output_with(reader, "on");
    until("it runs", || running("sleep 7742") == 1);
    client.reset(starter);
    let end = client.finish(reader).end;
    assert_eq!(end.get("exit").unwrap().int("signal"), Some(9));
    assert_eq!(running("sleep 7742"), 0);
}

#[test]
fn a_signal_reaches_the_whole_tree_once() {
    let host = Host::start();
    let mut client = host.connect();
    let log = host.file("log");
    // Every shell notes each signal that it gets; the setsid ones have left the session and their parent.
    let child =
        format!("trap 'echo $$ >> {0}' USR1; touch {0}.$$; while :; do sleep 0.05; done", log.display());
    let script = format!(
        "c() {{ {child}; }}; (setsid sh -c \"{0}\" &); setsid sh -c \"{0}\" & sh -c \"{0}\" & {child}",
        child.replace('$', "\\$"),
    );
    detach(&mut client, "tree", &script);
    let ready = || {
        let names = fs::read_dir(host.file("")).unwrap().flatten();
        names.filter(|entry| entry.file_name().to_string_lossy().starts_with("log.")).count()
    };
    until("all are ready", || ready() == 4);
    let end = client.call("exec.signal", &by_id("tree").uint("signal", 10)).end;
    assert!(end.int("processes").unwrap() >= 4, "{end:?}");
    let lines = || fs::read_to_string(&log).unwrap_or_default();
    until("all have noted it", || lines().lines().count() >= 4);
    std::thread::sleep(Duration::from_millis(150));
    let mut pids: Vec<String> = lines().lines().map(str::to_string).collect();
    assert_eq!(pids.len(), 4, "once each");
    pids.sort();
    pids.dedup();
    assert_eq!(pids.len(), 4);
    for wrong in [0, 65, 1 << 40] {
        let end = client.call("exec.signal", &by_id("tree").uint("signal", wrong)).end;
        assert_eq!(end.error(), "invalid_request");
    }
    let end = client.call("exec.signal", &by_id("tree").uint("signal", 9)).end;
    assert!(end.int("processes").unwrap() >= 4, "{end:?}");
    assert_eq!(attach(&mut client, "tree", 0).end.get("exit").unwrap().int("signal"), Some(9));
    until("nothing is left", || host.is_at_rest());
    assert_eq!(client.call("exec.signal", &by_id("tree").uint("signal", 15)).end.error(), "not_found");
}

#[test]
fn a_signal_passes_by_whoever_forks() {
    let host = Host::start();
    let mut client = host.connect();
    // Each generation forks the next and ends; TERM is not ignored, so the last one must die of it.
    detach(&mut client, "runner", "f() { sleep 0.002; f & }; f; exec sleep 7743");
    until("it runs", || running("sleep 7743") == 1);
    let end = client.call("exec.signal", &by_id("runner").uint("signal", 15)).end;
    assert!(end.int("processes").unwrap() >= 2, "{end:?}");
    assert_eq!(attach(&mut client, "runner", 0).end.get("exit").unwrap().int("signal"), Some(15));
    until("the tree is gone", || host.is_at_rest());
}

#[test]
fn what_is_meant_for_a_command_that_is_gone_meets_no_other() {
    let host = Host::start();
    let mut client = host.connect();
    // All of it is gone but 40,000 bytes in its pipe, which its reader gives no credit for.
    let script = "echo $PPID > parent; head -c 300000 /dev/zero";
    let cwd = host.file("").into_os_string().into_encoded_bytes();
    let request = command(
        &[b"sh", b"-c", format!("cd {}; {script}", String::from_utf8(cwd).unwrap()).as_bytes()],
        60_000,
    );
    let first = client.open("exec.start", &request.str("id", "first"));
    client.note(first);
    let supervisor =
        || fs::read_to_string(host.file("parent")).unwrap_or_default().trim().parse().unwrap_or(0);
    until("its supervisor is free", || host.idle().contains(&supervisor()));
    let mut other = host.connect();
    for (n, number) in ["7745", "7746", "7747"].iter().enumerate() {
        // One of them has that supervisor now.
        detach(&mut other, &format!("next-{n}"), &format!("exec sleep {number}"));
        until("it runs", || running(&format!("sleep {number}")) == 1);
    }
    assert!(!host.idle().contains(&supervisor()));
    for signal in [15, 9] {
        assert_eq!(
            other.call("exec.signal", &by_id("first").uint("signal", signal)).end.error(),
            "not_found"
        );
    }
    assert_eq!(other.call("exec.forget", &by_id("first")).end.error(), "");
    for number in ["7745", "7746", "7747"] {
        assert_eq!(running(&format!("sleep {number}")), 1);
    }
}

/// The kernel tells the end of a socket with something unread in it before what was sent to the other side.
#[test]
fn an_end_is_known_though_a_signal_came_too_late_for_it() {
    let host = Host::start();
    let mut client = host.connect();
    // Too long a command for a supervisor that goes on afterwards.
    let pid = detach(&mut client, "late", &format!("exec sleep 7748 # {}", "long ".repeat(10_000))) as i32;
    until("it runs", || running("sleep 7748") == 1);
    let daemon = host.child.id() as i32;
    let stat = |pid: i32| fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let supervisor: i32 = stat(pid).split(' ').nth(3).unwrap().parse().unwrap();
    let tell = |pid, signal| kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    tell(supervisor, Signal::STOP);
    until("its supervisor stands still", || stat(supervisor).contains(") T "));
    tell(pid, Signal::TERM);
    until("it has ended", || stat(pid).contains(") Z "));
    let signal = client.open("exec.signal", &by_id("late").uint("signal", 10));
    client.call("sys.info", &Args::new());
    tell(daemon, Signal::STOP);
    until("the daemon hears nothing for a while", || stat(daemon).contains(") T "));
    tell(supervisor, Signal::CONT);
    until("its supervisor has ended", || stat(supervisor).contains(") Z "));
    tell(daemon, Signal::CONT);
    assert_eq!(client.finish(signal).end.error(), "not_found");
    let end = attach(&mut client, "late", 0).end;
    assert_eq!(end.get("exit").and_then(|exit| exit.int("signal")), Some(15), "{end:?}");
}

#[test]
fn forget_ends_the_tree_also_with_a_stalled_starter() {
    let host = Host::start();
    let mut client = host.connect();
    let starter = client.open("exec.start", &named("noisy", "setsid sleep 7744 & yes"));
    client.note(starter);
    std::thread::sleep(Duration::from_millis(200));
    assert_eq!(host.connect().call("exec.forget", &by_id("noisy")).end.error(), "");
    assert_eq!(running("sleep 7744"), 0);
    assert_eq!(client.finish(starter).end.int("signal"), Some(9));
    assert_eq!(client.call("exec.list", &Args::new()).end.int("count"), Some(0));
}
