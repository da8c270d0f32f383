//! Commands: results, identity, the end of trees.

use crate::client::{Args, Client, Host, Item, KEY, command, running, until};
use rustix::process::{Pid, Signal, kill_process};
use std::fs;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

#[test]
fn results_are_exact() {
    let host = Host::start();
    let mut client = host.connect();
    let done = client.shell("printf 'a\\0b\\n\\r c'; printf err >&2; exit 7");
    assert_eq!((done.out.as_slice(), done.err.as_slice()), (&b"a\0b\n\r c"[..], &b"err"[..]));
    assert_eq!((done.end.int("code"), done.end.get("signal")), (Some(7), None));
    assert_eq!(done.end.get("timed_out"), Some(&Item::Bool(false)));
    assert!(done.end.int("wall_us").unwrap() > 0 && done.end.int("max_rss_kb").unwrap() > 0);
    let done = client.shell("kill -TERM $$");
    assert_eq!((done.end.get("code"), done.end.int("signal")), (None, Some(15)));
    let done = client.shell("echo $WHO; pwd; cat; ls /proc/self/fd | wc -l; umask; env | wc -l");
    assert_eq!(
        String::from_utf8(done.out).unwrap(),
        "me\n/\n4\n0022\n3\n",
        "three descriptors and that of ls"
    );
    let done = client.shell("head -c 10000000 /dev/zero; head -c 3000000 /dev/zero >&2");
    assert_eq!((done.out.len(), done.err.len()), (10_000_000, 3_000_000));
    let done = client.shell("i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done");
    assert!(done.end.int("user_us").unwrap() > 10_000);
}

#[test]
fn what_cannot_start_says_why() {
    let host = Host::start();
    let mut client = host.connect();
    let mut run = |argv: &[&[u8]]| client.call("exec.start", &command(argv, 5_000)).end;
    let missing = run(&[b"no-such-program"]);
    assert_eq!(missing.int("code"), Some(127));
    assert_eq!(missing.text("message"), Some("no-such-program: command not found"));
    assert_eq!(run(&[b"/no/such/program"]).int("code"), Some(127));
    let denied = run(&[b"/etc/passwd"]);
    assert_eq!(denied.int("code"), Some(126));
    assert_eq!(denied.text("message"), Some("/etc/passwd: Permission denied"));
    assert_eq!(run(&[b"/"]).int("code"), Some(126));
    assert_eq!(
        run(&[b"true", &[b'x'; 200_000]]).error(),
        "invalid_request",
        "one argument above the kernel's limit"
    );
    let (empty, nul): (&[u8], &[u8]) = (b"", b"a\0b");
    for argv in [&[][..], &[empty], &[nul]] {
        assert_eq!(run(argv).error(), "invalid_request");
    }
    assert_eq!(
        run(&vec![&b"x"[..]; 300_000]).error(),
        "invalid_request",
        "more strings than the kernel takes"
    );
    fs::write(host.file("script"), "no interpreter line").unwrap();
    fs::set_permissions(host.file("script"), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let script = run(&[&host.at("script")]);
    assert_eq!(script.text("message").map(|text| text.contains("Exec format error")), Some(true));
    let base = Args::new().bins("argv", &[b"true"]);
    for (args, code) in [
        (base.clone().pairs("env", &[]).bin("cwd", "/missing").uint("timeout_ms", 1_000), "workdir"),
        (base.clone().pairs("env", &[]).bin("cwd", "/etc/passwd").uint("timeout_ms", 1_000), "workdir"),
        (base.clone().pairs("env", &[]).bin("cwd", "relative").uint("timeout_ms", 1_000), "invalid_request"),
        (base.clone().pairs("env", &[]).bin("cwd", "/").uint("timeout_ms", 0), "invalid_request"),
        (
            base.clone().pairs("env", &[(b"A=B", b"c")]).bin("cwd", "/").uint("timeout_ms", 1),
            "invalid_request",
        ),
        (base.clone().pairs("env", &[(b"", b"c")]).bin("cwd", "/").uint("timeout_ms", 1), "invalid_request"),
        (
            base.clone().pairs("env", &[(b"A", b"c\0")]).bin("cwd", "/").uint("timeout_ms", 1),
            "invalid_request",
        ),
    ] {
        assert_eq!(client.call("exec.start", &args).end.error(), code);
    }
    let none = base.pairs("env", &[]).bin("cwd", "/").uint("timeout_ms", 5_000);
    assert_eq!(client.call("exec.start", &none).end.int("code"), Some(0), "found on the default path");
}

#[test]
fn long_argument_lists_pass() {
    let host = Host::start();
    let mut client = host.connect();
    let argument = [b'x'; 1_000];
    let mut argv: Vec<&[u8]> = vec![b"echo"];
    argv.extend(std::iter::repeat_n(&argument[..], 1_200));
    let done = client.call("exec.start", &command(&argv, 10_000));
    assert_eq!((done.end.int("code"), done.out.len()), (Some(0), 1_200 * 1_001));
}

#[test]
fn a_command_is_nobody_and_cannot_become_more() {
    let host = Host::start();
    let mut client = host.connect();
    let done = client.shell("id -u; id -g; id -G; cat /proc/self/status; cat /proc/self/oom_score_adj");
    let text = String::from_utf8(done.out).unwrap();
    let uid = host.uid;
    assert!(text.starts_with(&format!("{uid}\n{uid}\n{uid}\n")), "{text}");
    for set in ["Inh", "Prm", "Eff", "Bnd", "Amb"] {
        assert!(text.contains(&format!("Cap{set}:\t0000000000000000\n")), "{set}");
    }
    for line in [
        "NoNewPrivs:\t1\n",
        "Seccomp:\t2\n",
        "Groups:\t \n",
        "SigBlk:\t0000000000000000\n",
        "SigIgn:\t0000000000000000\n",
    ] {
        assert!(text.contains(line), "{line:?} in {text}");
    }
    assert!(text.ends_with("\n1000\n"));
    let daemon = host.child.id();
    let done = client.shell(&format!(
        "kill -9 {daemon} 2>&1; kill -9 $PPID 2>&1; cat /proc/{daemon}/environ 2>&1; ls /proc/{daemon}/fd 2>&1; unshare -U true 2>&1; true"
    ));
    let text = String::from_utf8(done.out).unwrap();
    assert_eq!(text.matches("ermitted").count() + text.matches("denied").count(), 5, "{text}");
}

#[test]
fn a_deadline_ends_the_whole_tree() {
    let host = Host::start();
    let mut client = host.connect();
    let start = Instant::now();
    let id = client.start(
        "echo before; (setsid sleep 7731 &) ; setsid sh -c 'sleep 7731 & sleep 7731' & sleep 7731 & wait",
        400,
    );
    let done = client.finish(id);
    assert!((400..2_000).contains(&start.elapsed().as_millis()));
    assert_eq!(done.out, b"before\n");
    assert_eq!((done.end.get("timed_out"), done.end.int("signal")), (Some(&Item::Bool(true)), Some(9)));
    assert_eq!(running("sleep 7731"), 0, "nothing is left at END");
    until("nothing is left", || host.is_at_rest());
}

#[test]
fn a_deadline_holds_with_a_stalled_reader() {
    let host = Host::start();
    let mut client = host.connect();
    let id = client.start("yes 7732", 2_000);
    until("it runs", || running("yes 7732") == 1);
    until("it is killed while nobody reads", || running("yes 7732") == 0);
    let done = client.finish(id);
    assert_eq!(done.end.get("timed_out"), Some(&Item::Bool(true)));
    assert!(
        (262_140..400_000).contains(&done.out.len()),
        "what was in the pipe still comes: {}",
        done.out.len()
    );
}

#[test]
fn what_a_command_leaves_goes_on() {
    let host = Host::start();
    let mut client = host.connect();
    let start = Instant::now();
    let done = client.shell("(while :; do echo noise; done) & sleep 7733 & echo done");
    assert!(start.elapsed() < Duration::from_secs(60));
    assert!(done.out.windows(5).any(|part| part == b"done\n"));
    until("it goes on", || running("sleep 7733") == 1);
    assert_eq!(client.call("sys.info", &Args::new()).end.int("execs"), Some(1));
    assert_eq!(client.shell("echo next").out, b"next\n");
    client.shell("kill -9 -1");
    until("its supervisor is free with its last child", || host.is_at_rest());
}

#[test]
fn a_reset_ends_the_whole_tree_and_nothing_follows() {
    let host = Host::start();
    let mut client = host.connect();
    let id = client.start("setsid sleep 7734 & sleep 7734", 60_000);
    until("it runs", || running("sleep 7734") >= 2);
    client.reset(id);
    until("it is gone", || running("sleep 7734") == 0);
    client.send(8, 0, b"12345678");
    assert_eq!(client.receive().unwrap().0, 9, "no END after RESET");
}

#[test]
fn a_lost_connection_ends_nothing_but_the_deadline_does() {
    let host = Host::start();
    let mut client = host.connect();
    let script =
        format!("head -c 5000000 /dev/zero; echo alive > {}; sleep 7735", host.file("mark").display());
    client.start(&script, 1_500);
    drop(client);
    until("its output is drained", || host.file("mark").exists());
    until("it goes on", || running("sleep 7735") == 1);
    until("the deadline comes", || running("sleep 7735") == 0);
}

#[test]
fn a_killed_supervisor_is_an_error_and_leaves_nothing() {
    let host = Host::start();
    let mut client = host.connect();
    let id = client.start("setsid sleep 7736 & sleep 7736", 60_000);
    until("it runs", || running("sleep 7736") >= 2);
    for (_, pid) in host.children() {
        kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).unwrap();
    }
    assert_eq!(client.finish(id).end.error(), "internal");
    until("its tree is gone", || running("sleep 7736") == 0);
    assert_eq!(client.shell("echo fine").out, b"fine\n");
}

#[test]
fn many_commands_leave_no_zombies() {
    let host = Host::start();
    let mut client = host.connect();
    for _ in 0..200 {
        assert_eq!(client.shell("exit 0").end.int("code"), Some(0));
    }
    let ids: Vec<_> = (0..64).map(|n| client.start(&format!("sleep 0.1; echo {n}"), 20_000)).collect();
    for (n, id) in ids.into_iter().enumerate() {
        assert_eq!(client.finish(id).out, format!("{n}\n").as_bytes());
    }
    until("all are reaped", || host.is_at_rest());
    assert_eq!(client.call("sys.info", &Args::new()).end.int("execs"), Some(0));
}

/// How many commands run, or have left something running.
fn execs(host: &Host) -> i64 {
    host.connect().call("sys.info", &Args::new()).end.int("execs").unwrap()
}

/// The process that a command has for a parent.
fn parent(client: &mut Client) -> i32 {
    let out = client.shell("echo $PPID").out;
    String::from_utf8(out).unwrap().trim().parse().unwrap()
}

#[test]
fn a_supervisor_has_one_command_after_the_other_and_never_two() {
    let host = Host::start();
    let mut client = host.connect();
    let mut parents: Vec<i32> = Vec::new();
    for _ in 0..20 {
        parents.push(parent(&mut client));
        until("it is free", || execs(&host) == 0);
    }
    parents.sort_unstable();
    parents.dedup();
    assert!(parents.len() <= 2, "{parents:?}");
    client.shell("sleep 7738 &");
    client.shell("sleep 7738 &");
    let busy = || {
        let idle = host.idle();
        host.children().into_iter().map(|(_, pid)| pid).filter(|pid| !idle.contains(pid)).collect::<Vec<_>>()
    };
    until("two have something below them", || execs(&host) == 2 && busy().len() == 2);
    let busy = busy();
    for _ in 0..4 {
        until("another is there", || !host.idle().is_empty());
        assert!(!busy.contains(&parent(&mut client)), "what is left of a command keeps its supervisor");
    }
    until("two of three are busy", || execs(&host) == 2);
    client.shell("kill -9 -1");
    until("all are free again", || host.is_at_rest());
}

#[test]
fn a_command_cannot_touch_a_supervisor() {
    let host = Host::start();
    let mut client = host.connect();
    let before = parent(&mut client);
    until("it is free", || host.is_at_rest() && host.idle().len() == 2);
    let all: Vec<String> = host.idle().iter().map(i32::to_string).collect();
    for pid in &all {
        let attack = format!(
            "for n in KILL STOP TERM CHLD USR1; do kill -$n {pid} && echo sent; done; \
             cat /proc/{pid}/mem /proc/{pid}/environ /proc/{pid}/maps; ls /proc/{pid}/fd; echo 1000 > /proc/{pid}/oom_score_adj"
        );
        assert_eq!(client.shell(&format!("({attack}) 2>/dev/null")).out, b"", "{pid}");
    }
    assert!(all.contains(&parent(&mut client).to_string()) && all.contains(&before.to_string()));
}

#[test]
fn a_waiting_supervisor_that_is_dead_or_stopped_is_not_waited_for() {
    let host = Host::start();
    let mut client = host.connect();
    for signal in [Signal::KILL, Signal::STOP] {
        for _ in 0..3 {
            for pid in host.idle() {
                // One that was for a single command may have ended meanwhile.
                let _ = kill_process(Pid::from_raw(pid).unwrap(), signal);
            }
            // A signal that was sent has not yet arrived.
            until("it has felt it", || host.idle().is_empty());
            let done = client.shell("echo fine");
            assert_eq!((done.out, done.end.int("code")), (b"fine\n".to_vec(), Some(0)), "{signal:?}");
        }
        until("no dead one and no stopped one is left", || host.is_at_rest());
    }
}

#[test]
fn a_waiting_supervisor_holds_no_descriptor_no_capability_and_no_word_of_a_command() {
    let host = Host::start();
    let mut client = host.connect();
    let secret = format!("word-of-{}", host.uid);
    assert_eq!(client.shell(&format!("echo {secret}")).out, format!("{secret}\n").as_bytes());
    until("it waits", || host.is_at_rest() && !host.idle().is_empty());
    for pid in host.idle() {
        let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
        let open: Vec<_> = open.map(|entry| fs::read_link(entry.path()).unwrap().into_os_string()).collect();
        assert!(open.len() == 1 && open[0].to_string_lossy().starts_with("socket:"), "{open:?}");
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        assert!(status.contains("CapBnd:\t0000000000000000"), "{status}");
        for word in [secret.as_bytes(), &KEY] {
            assert!(!holds(pid, word), "{pid} has kept what it should not");
        }
    }
    assert!(holds(std::process::id() as i32, secret.as_bytes()), "looking finds what is there");
}

/// Whether a process has some bytes in memory of its own.
fn holds(pid: i32, word: &[u8]) -> bool {
    let memory = fs::File::open(format!("/proc/{pid}/mem")).unwrap();
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    maps.lines().filter(|line| line.contains(" rw")).any(|line| {
        let (from, to) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        let number = |text| u64::from_str_radix(text, 16).unwrap();
        let mut bytes = vec![0; (number(to) - number(from)) as usize];
        let _ = memory.read_exact_at(&mut bytes, number(from));
        bytes.windows(word.len()).any(|found| found == word)
    })
}

#[test]
fn a_dead_daemon_takes_its_commands_along() {
    let mut host = Host::start();
    let mut client = host.connect();
    client.start("setsid sleep 7737 & sleep 7737", 60_000);
    until("it runs", || running("sleep 7737") >= 2);
    host.child.kill().unwrap();
    until("it is gone", || running("sleep 7737") == 0);
}
