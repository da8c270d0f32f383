//! Making, moving, removing, changing modes; archives of a directory; the system's operations.

use crate::client::{Args, Client, Host, Item, Raise, path};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::sync::atomic::{AtomicBool, Ordering};

fn mode(host: &Host, name: &str) -> u32 {
    fs::symlink_metadata(host.file(name)).unwrap().permissions().mode() & 0o7777
}

fn fill(client: &mut Client, host: &Host, script: &str) {
    let done = client.shell(&format!("cd {} && {script}", host.file("").display()));
    assert_eq!(done.end.int("code"), Some(0), "{}", String::from_utf8_lossy(&done.err));
}

#[test]
fn directories_are_made_with_the_mode_asked_for() {
    let host = Host::start();
    let mut client = host.connect();
    let mut make = |name: &str, parents: bool| {
        let args = path(host.at(name)).uint("mode", 0o2775).bool("parents", parents);
        client.call("fs.mkdir", &args).end
    };
    let entry = make("a/b/c", true);
    let entry = entry.get("entry").unwrap();
    assert_eq!((entry.text("type"), entry.int("mode")), (Some("directory"), Some(0o2775)));
    assert_eq!(entry.get("name"), Some(&Item::Bin(b"c".to_vec())));
    assert_eq!((mode(&host, "a/b/c"), mode(&host, "a/b")), (0o2775, 0o755));
    assert_eq!(fs::metadata(host.file("a/b/c")).unwrap().uid(), host.uid);
    assert_eq!(make("a/b/c/", true).error(), "", "an existing one is fine");
    assert_eq!(make("", true).error(), "", "the workspace exists");
    assert_eq!(make("a/b/c", false).error(), "conflict");
    assert_eq!(make("x/y", false).error(), "not_found");
    fs::write(host.file("file"), b"").unwrap();
    symlink("a", host.file("to-a")).unwrap();
    symlink("nowhere", host.file("dangling")).unwrap();
    symlink("/etc", host.file("etc")).unwrap();
    assert_eq!(make("file", true).error(), "conflict");
    assert_eq!(make("dangling", true).error(), "conflict");
    assert_eq!(make("to-a/d", true).error(), "");
    assert_eq!(make("to-a", true).error(), "");
    assert!(host.file("a/d").is_dir());
    for name in ["etc/x", "../x", "file/x"] {
        assert_eq!(make(name, true).error(), "invalid_request", "{name}");
    }
}

#[test]
fn names_move_and_links_move_as_links() {
    let host = Host::start();
    let mut client = host.connect();
    fill(
        &mut client,
        &host,
        "mkdir d full empty; touch full/x; echo one > one; echo two > two; ln -s /etc l",
    );
    let mut go = |from: &str, to: &str, replace: bool| {
        let args = Args::new().bin("from", host.at(from)).bin("to", host.at(to)).bool("replace", replace);
        client.call("fs.move", &args).end
    };
    assert_eq!(go("one", "two", false).error(), "conflict");
    let end = go("one", "two", true);
    assert_eq!(end.get("entry").unwrap().get("name"), Some(&Item::Bin(b"two".to_vec())));
    assert_eq!(fs::read(host.file("two")).unwrap(), b"one\n");
    assert_eq!(go("one", "three", true).error(), "not_found");
    assert_eq!(go("l", "d/l", false).get("entry").unwrap().text("type"), Some("symlink"));
    assert_eq!(go("d", "full", true).error(), "conflict", "a directory that is not empty");
    assert_eq!(go("d", "empty", true).error(), "");
    assert_eq!(go("two", "full", true).error(), "invalid_request", "a file onto a directory");
    assert_eq!(go("full", "full/inner", true).error(), "invalid_request");
    assert_eq!(go("two", "missing/two", true).error(), "not_found");
    for (from, to) in [("", "x"), ("two", ""), ("empty/l/hosts", "x"), ("two", "empty/l/x"), ("two", "../x")]
    {
        assert_eq!(go(from, to, true).error(), "invalid_request", "{from:?} {to:?}");
    }
    assert!(host.file("two").exists() && host.file("full/x").exists());
}

#[test]
fn modes_change_through_links_that_stay_inside() {
    let host = Host::start();
    let mut client = host.connect();
    fill(
        &mut client,
        &host,
        "touch f; mkdir d; ln -s f inside; ln -s /etc/passwd outside; ln -s gone dangling",
    );
    let mut chmod =
        |name: &str, mode: u64| client.call("fs.chmod", &path(host.at(name)).uint("mode", mode)).end;
    assert_eq!(chmod("f", 0o4711).get("entry").unwrap().int("mode"), Some(0o4711));
    assert_eq!(chmod("inside", 0o600).get("entry").unwrap().text("type"), Some("file"));
    assert_eq!(mode(&host, "f"), 0o600);
    assert_eq!(chmod("d", 0).error(), "");
    assert_eq!(chmod("", 0o750).error(), "");
    assert_eq!(mode(&host, ""), 0o750);
    assert_eq!(chmod("outside", 0o666).error(), "invalid_request");
    assert_eq!(chmod("dangling", 0o666).error(), "not_found");
    assert_eq!(chmod("f", 0o10000).error(), "invalid_request");
    fs::write(host.file("roots"), b"").unwrap();
    assert_eq!(chmod("roots", 0o666).error(), "permission");
}

#[test]
fn a_removal_takes_names_and_never_what_a_link_leads_to() {
    let host = Host::start();
    let mut client = host.connect();
    let outside = host.place.join("outside");
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("keep"), b"").unwrap();
    for path in [outside.clone(), outside.join("keep")] {
        chown(path, Some(host.uid), Some(host.uid)).unwrap();
    }
    let script = format!(
        "mkdir -p t/a/b e locked/in; touch t/f t/a/g t/a/b/h locked/in/x; mkfifo t/p; ln -s {0} t/a/link; ln -s {0} link; chmod 0 locked/in; chmod 500 locked",
        outside.display()
    );
    fill(&mut client, &host, &script);
    let mut remove = |name: &str, recursive: bool| {
        client.call("fs.remove", &path(host.at(name)).bool("recursive", recursive)).end
    };
    assert_eq!(remove("t", false).error(), "conflict");
    assert_eq!(remove("e", false).int("removed"), Some(1));
    assert_eq!(remove("link", true).int("removed"), Some(1));
    assert_eq!(remove("t", true).int("removed"), Some(8));
    assert_eq!(remove("t", true).error(), "not_found");
    assert_eq!(remove("locked", true).int("removed"), Some(3), "its owner may widen it");
    for name in ["", ".", "./x/..", "../outside"] {
        assert_eq!(remove(name, true).error(), "invalid_request", "{name:?}");
    }
    fs::create_dir(host.file("roots")).unwrap();
    fs::write(host.file("roots/x"), b"").unwrap();
    assert_eq!(remove("roots", true).error(), "permission");
    assert!(outside.join("keep").exists() && host.file("roots/x").exists());
}

#[test]
fn a_deep_and_a_wide_tree_go() {
    let host = Host::start();
    let mut client = host.connect();
    fill(
        &mut client,
        &host,
        "mkdir deep wide; i=0; (cd deep; while [ $i -lt 1000 ]; do mkdir d; touch f; cd d; i=$((i+1)); done); \
         cd wide; seq 5000 | xargs touch; seq -f d%g 3000 | xargs mkdir",
    );
    let mut remove = |name: &str| client.call("fs.remove", &path(host.at(name)).bool("recursive", true)).end;
    assert_eq!(remove("deep").int("removed"), Some(2_001));
    assert_eq!(remove("wide").int("removed"), Some(8_001));
    assert!(host.status("FDSize:") < 512, "no descriptor for each level");
}

#[test]
fn a_racer_that_exchanges_directories_and_links_gains_nothing() {
    let host = Host::start();
    let outside = host.place.join("outside");
    fs::create_dir_all(outside.join("sub")).unwrap();
    for n in 0..20 {
        fs::write(outside.join(format!("sub/{n}")), b"").unwrap();
    }
    let owned =
        std::process::Command::new("chown").arg("-R").arg(host.uid.to_string()).arg(&outside).status();
    assert!(owned.unwrap().success());
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let _raise = Raise(&stop);
            let mut client = host.connect();
            for _ in 0..60 {
                // The racer may take away what is being filled.
                let fill =
                    "mkdir -p t/a/sub t/b; for i in 1 2 3 4 5 6 7 8 9; do touch t/a/sub/$i t/b/$i; done";
                client.shell(&format!("cd {}; {fill}", host.file("").display()));
                let end = client.call("fs.remove", &path(host.at("t")).bool("recursive", true)).end;
                assert!(matches!(end.error(), "" | "conflict" | "not_found"), "{end:?}");
            }
        });
        scope.spawn(|| {
            symlink(&outside, host.file("evil")).unwrap();
            while !stop.load(Ordering::Relaxed) {
                for name in ["t/a", "t/a/sub", "t/b", "t"] {
                    let (one, other) = (host.file(name), host.file("evil"));
                    let exchange = rustix::fs::RenameFlags::EXCHANGE;
                    let cwd = rustix::fs::CWD;
                    let _ = rustix::fs::renameat_with(cwd, &one, cwd, &other, exchange);
                    let _ = rustix::fs::renameat_with(cwd, &one, cwd, &other, exchange);
                }
            }
        });
    });
    assert_eq!(fs::read_dir(outside.join("sub")).unwrap().count(), 20);
}

#[test]
fn an_archive_of_a_directory_goes_into_another() {
    let host = Host::start();
    let mut client = host.connect();
    fill(
        &mut client,
        &host,
        "mkdir -p src/d; echo x > src/d/f; echo no > beside; ln -s src to-src; ln -s /etc etc",
    );
    let args = |name: &str| path(host.at(name)).uint("max_bytes", 1 << 20);
    let done = client.call("tar.export", &args("src"));
    assert_eq!(done.end.int("entries"), Some(3));
    assert!(client.call("tar.export", &args("to-src")).out == done.out);
    let end = client.put("tar.import", &args("new/place"), &done.out);
    assert_eq!(end.int("entries"), Some(3));
    assert_eq!(fs::read(host.file("new/place/d/f")).unwrap(), b"x\n");
    assert!(!host.file("new/place/beside").exists());
    for (name, code) in [
        ("beside", "invalid_request"),
        ("missing", "not_found"),
        ("etc", "invalid_request"),
        ("..", "invalid_request"),
    ] {
        assert_eq!(client.call("tar.export", &args(name)).end.error(), code, "{name}");
    }
    let elsewhere = path("/etc").uint("max_bytes", 1 << 20);
    assert_eq!(client.call("tar.export", &elsewhere).end.error(), "invalid_request");
    for name in ["beside", "etc", "../x"] {
        assert_eq!(client.put("tar.import", &args(name), &done.out).error(), "invalid_request", "{name}");
    }
}

#[test]
fn it_syncs_counts_and_ends_when_told() {
    let mut host = Host::start();
    let mut client = host.connect();
    assert_eq!(client.call("sys.sync", &Args::new()).end.error(), "");
    client.call(
        "exec.start",
        &crate::client::named("a", "setsid sleep 7761 & sleep 7761").bool("detach", true),
    );
    let stats = client.call("sys.stats", &Args::new()).end;
    assert_eq!((stats.int("execs"), stats.int("ring_bytes")), (Some(1), Some(0)));
    assert!(stats.int("processes").unwrap() >= 2);
    let memory = stats.int("memory_bytes").unwrap();
    assert!((500_000..40_000_000).contains(&memory), "{memory}");
    let id = client.open("sys.shutdown", &Args::new());
    assert_eq!(client.finish(id).end, Item::Map(std::collections::HashMap::new()));
    assert_eq!(client.last_word(), "shutdown");
    assert_eq!(host.child.wait().unwrap().code(), Some(0));
    crate::client::until("every command goes along", || crate::client::running("sleep 7761") == 0);
}
