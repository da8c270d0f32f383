//! What a watch says about a changing tree.

use crate::client::{Args, Client, Host, Item, Raise, entries, path, until};
use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

type Change = (String, String, String);

struct Watch {
    id: u32,
    seen: Vec<Change>,
    overflows: usize,
}

impl Watch {
    fn start(client: &mut Client, host: &Host, name: &str, recursive: bool) -> Watch {
        let id = client.open("fs.watch", &path(host.at(name)).bool("recursive", recursive));
        assert_eq!(client.note(id).get("ready"), Some(&Item::Bool(true)));
        Watch { id, seen: Vec::new(), overflows: 0 }
    }

    /// Read changes until one is about this name.
    fn until(&mut self, client: &mut Client, host: &Host, name: &str) {
        let root = host.at("");
        let text = |item: Option<&Item>| match item {
            Some(Item::Bin(path)) => {
                let path = path.strip_prefix(&root[..]).unwrap_or(path);
                String::from_utf8(path.to_vec()).unwrap()
            }
            _ => String::new(),
        };
        loop {
            if self.seen.iter().any(|(_, path, to)| path == name || to == name) {
                return;
            }
            let (kind, _, payload) = client.next_of(self.id);
            assert_eq!((kind, payload[0]), (3, 1), "{:?}", Item::decode(&mut &payload[..]));
            client.credit(self.id, payload.len() as u32);
            for change in entries(&payload[1..]) {
                if change.get("overflow").is_some() {
                    self.overflows += 1;
                    continue;
                }
                let kind = change.text("kind").unwrap().to_string();
                self.seen.push((kind, text(change.get("path")), text(change.get("to"))));
            }
        }
    }

    fn has(&self, kind: &str, path: &str) -> bool {
        self.seen.iter().any(|change| change.0 == kind && change.1 == path)
    }
}

#[test]
fn every_kind_of_change_is_told() {
    let host = Host::start();
    let mut client = host.connect();
    fs::create_dir_all(host.file("old/sub")).unwrap();
    fs::create_dir(host.place.join("beside")).unwrap();
    let mut watch = Watch::start(&mut client, &host, "", true);
    fs::write(host.file("old/sub/f"), b"x").unwrap();
    fs::rename(host.file("old/sub/f"), host.file("old/g")).unwrap();
    fs::remove_file(host.file("old/g")).unwrap();
    fs::rename(host.file("old"), host.file("new")).unwrap();
    fs::write(host.file("new/sub/after"), b"").unwrap();
    fs::rename(host.file("new/sub"), host.place.join("beside/sub")).unwrap();
    watch.until(&mut client, &host, "new/sub");
    fs::write(host.place.join("beside/sub/unseen"), b"").unwrap();
    fs::write(host.file("end"), b"").unwrap();
    watch.until(&mut client, &host, "end");
    for (kind, path) in [
        ("created", "old/sub/f"),
        ("modified", "old/sub/f"),
        ("removed", "old/g"),
        ("created", "new/sub/after"),
        ("created", "end"),
        ("removed", "new/sub"),
    ] {
        assert!(watch.has(kind, path), "{kind} {path} in {:?}", watch.seen);
    }
    let moves: Vec<_> = watch.seen.iter().filter(|change| change.0 == "moved").collect();
    assert_eq!(
        moves.iter().map(|(_, from, to)| (&from[..], &to[..])).collect::<Vec<_>>(),
        [("old/sub/f", "old/g"), ("old", "new")]
    );
    assert!(!watch.seen.iter().any(|change| change.1.contains("unseen")));
    client.reset(watch.id);
    assert_eq!(client.call("sys.info", &Args::new()).end.error(), "");
}

#[test]
fn an_upload_is_seen_under_its_own_name_alone() {
    let host = Host::start();
    let mut client = host.connect();
    fs::write(host.file("old"), b"before").unwrap();
    let mut watch = Watch::start(&mut client, &host, "", true);
    let write = |client: &mut Client, name: &str, bytes: &[u8]| {
        let end = client.put("fs.write", &path(host.at(name)).uint("mode", 0o600), bytes);
        assert_eq!(end.error(), "", "{name}");
    };
    write(&mut client, "new", b"one");
    write(&mut client, "new", b"two");
    write(&mut client, "old", &[7; 300_000]);
    write(&mut client, "dir/deep", b"");
    // One that is given up on the way was never there.
    let id = client.open("fs.write", &path(host.at("given-up")).uint("mode", 0o644));
    assert!(client.upload(id, 0, b"some"));
    until("the upload has begun", || fs::read_dir(host.file("")).unwrap().count() > 3);
    client.reset(id);
    until("the upload has gone", || fs::read_dir(host.file("")).unwrap().count() == 3);
    fs::rename(host.file("new"), host.file("moved")).unwrap();
    watch.until(&mut client, &host, "moved");
    let seen: Vec<_> = watch.seen.iter().map(|(kind, path, to)| (&kind[..], &path[..], &to[..])).collect();
    let (first, last) = seen.split_at(3);
    assert_eq!(first, [("created", "new", ""), ("modified", "new", ""), ("modified", "old", "")]);
    assert_eq!(
        last,
        [("created", "dir", ""), ("created", "dir/deep", ""), ("moved", "new", "moved")],
        "in {seen:?}"
    );
}

#[test]
fn new_directories_are_watched_however_fast_they_fill() {
    let host = Host::start();
    let mut client = host.connect();
    let mut watch = Watch::start(&mut client, &host, "", true);
    let mut expected = HashSet::new();
    for n in 0..150 {
        fs::create_dir_all(host.file(&format!("t{n}/a/b/c"))).unwrap();
        fs::write(host.file(&format!("t{n}/a/b/c/f")), b"").unwrap();
        for name in ["", "/a", "/a/b", "/a/b/c", "/a/b/c/f"] {
            expected.insert(format!("t{n}{name}"));
        }
    }
    fs::write(host.file("end"), b"").unwrap();
    watch.until(&mut client, &host, "t149/a/b/c/f");
    let created: Vec<&String> = watch
        .seen
        .iter()
        .filter(|change| change.0 == "created" && change.1 != "end")
        .map(|change| &change.1)
        .collect();
    assert_eq!(created.len(), expected.len(), "each one once");
    assert_eq!(created.into_iter().cloned().collect::<HashSet<_>>(), expected);
    // Each of them is really watched.
    fs::write(host.file("t77/a/b/c/late"), b"").unwrap();
    watch.until(&mut client, &host, "t77/a/b/c/late");
    assert_eq!(watch.overflows, 0);
}

#[test]
fn a_storm_of_renames_leaves_the_watch_right() {
    let host = Host::start();
    let mut client = host.connect();
    for name in ["a/x/deep", "b", "c"] {
        fs::create_dir_all(host.file(name)).unwrap();
    }
    let mut watch = Watch::start(&mut client, &host, "", true);
    std::thread::scope(|scope| {
        for (from, to) in [("a/x", "b/x"), ("b/x", "c/x"), ("c/x", "a/x"), ("a", "b/a"), ("b/a", "a")] {
            let host = &host;
            scope.spawn(move || {
                for _ in 0..2_000 {
                    let _ = fs::rename(host.file(from), host.file(to));
                }
            });
        }
    });
    // Wherever everything is now, a change there is told under its true name.
    let found =
        std::process::Command::new("find").arg(host.file("")).args(["-name", "deep"]).output().unwrap();
    let deep = String::from_utf8(found.stdout).unwrap();
    let name = format!("{}/mark", deep.trim().strip_prefix(host.file("").to_str().unwrap()).unwrap());
    fs::write(host.file("settled"), b"").unwrap();
    watch.until(&mut client, &host, "settled");
    std::thread::sleep(std::time::Duration::from_millis(50));
    fs::write(host.file(&name), b"").unwrap();
    watch.until(&mut client, &host, &name);
}

#[test]
fn a_client_that_takes_nothing_is_told_that_it_lost_some() {
    let host = Host::start();
    let mut client = host.connect();
    let mut watch = Watch::start(&mut client, &host, "", true);
    let limit: usize =
        fs::read_to_string("/proc/sys/fs/inotify/max_queued_events").unwrap().trim().parse().unwrap();
    let before = host.status("VmRSS:");
    let long = "n".repeat(200);
    for n in 0..limit + 10_000 {
        let name = host.file(&format!("{long}{}", n % 1_000));
        if n / 1_000 % 2 == 0 { drop(fs::write(&name, b"")) } else { drop(fs::remove_file(&name)) }
    }
    fs::create_dir(host.file("while-lost")).unwrap();
    assert!(host.status("VmRSS:") < before + 3_000);
    // Reading on, the loss is told, and what has come meanwhile is watched again.
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut numbers = 0..;
            while !stop.load(Ordering::Relaxed) {
                fs::write(host.file(&format!("while-lost/{}", numbers.next().unwrap())), b"").unwrap();
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let _raise = Raise(&stop);
        let mut found = false;
        while watch.overflows == 0 || !found {
            let (_, _, payload) = client.next_of(watch.id);
            client.credit(watch.id, payload.len() as u32);
            for change in entries(&payload[1..]) {
                watch.overflows += usize::from(change.get("overflow").is_some());
                let Some(Item::Bin(path)) = change.get("path") else { continue };
                found |= path.starts_with(&host.at("while-lost/"));
            }
        }
    });
}

#[test]
fn watches_have_limits_and_ends() {
    let host = Host::start();
    let mut client = host.connect();
    fs::create_dir_all(host.file("d/inner")).unwrap();
    fs::write(host.file("file"), b"").unwrap();
    symlink(host.file("d"), host.file("link")).unwrap();
    let mut flat = Watch::start(&mut client, &host, "link", false);
    fs::write(host.file("d/inner/quiet"), b"").unwrap();
    fs::create_dir(host.file("d/new")).unwrap();
    fs::write(host.file("d/new/quiet"), b"").unwrap();
    fs::write(host.file("d/end"), b"").unwrap();
    flat.until(&mut client, &host, "link/end");
    assert!(!flat.seen.iter().any(|change| change.1.contains("quiet")), "{:?}", flat.seen);
    assert_eq!(client.call("fs.watch", &path(host.at("file"))).end.error(), "invalid_request");
    assert_eq!(client.call("fs.watch", &path(host.at("none"))).end.error(), "not_found");
    assert_eq!(client.call("fs.watch", &path("/root")).end.error(), "permission");
    let others: Vec<_> = (1..16).map(|_| Watch::start(&mut client, &host, "d", true)).collect();
    assert_eq!(client.call("fs.watch", &path(host.at("d"))).end.error(), "exhausted");
    client.reset(others[0].id);
    let place = Watch::start(&mut client, &host, "d", true);
    fs::remove_dir_all(host.file("d")).unwrap();
    loop {
        let (kind, _, payload) = client.next_of(place.id);
        if kind == 6 {
            assert_eq!(Item::decode(&mut &payload[..]).error(), "not_found");
            break;
        }
    }
    for n in 0..8_200 {
        fs::create_dir_all(host.file(&format!("wide/{n}"))).unwrap();
    }
    assert_eq!(client.call("fs.watch", &path(host.at("wide"))).end.error(), "exhausted");
    let end = client.open("fs.watch", &path(host.at("wide")).bool("recursive", false));
    assert_eq!(client.note(end).get("ready"), Some(&Item::Bool(true)));
}
