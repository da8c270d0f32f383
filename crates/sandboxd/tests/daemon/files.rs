//! Files and archives over the wire.

use crate::client::{Args, Client, Host, Item, entries, path, until};
use std::collections::HashSet;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

fn write(client: &mut Client, to: impl AsRef<[u8]>, bytes: &[u8]) -> Item {
    client.put("fs.write", &path(to).uint("mode", 0o640), bytes)
}

fn temporaries(host: &Host) -> usize {
    let names = fs::read_dir(host.place.join("w")).unwrap().flatten();
    names.filter(|entry| entry.file_name().to_string_lossy().starts_with(".asb-")).count()
}

#[test]
fn a_file_there_and_back() {
    let host = Host::start();
    let mut client = host.connect();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|n| (n ^ n >> 8) as u8).collect();
    let end = write(&mut client, host.at("new/dir/file"), &bytes);
    let entry = end.get("entry").unwrap();
    assert_eq!((entry.int("size"), entry.int("mode")), (Some(3_000_000), Some(0o640)));
    assert_eq!(entry.get("name"), Some(&Item::Bin(b"file".to_vec())));
    assert_eq!(entry.text("type"), Some("file"));
    let stat = fs::metadata(host.file("new/dir/file")).unwrap();
    assert_eq!((stat.uid(), stat.gid()), (host.uid, host.uid));
    assert_eq!(fs::metadata(host.file("new")).unwrap().permissions().mode() & 0o7777, 0o755);
    let done = client.call("fs.read", &path(host.at("new/dir/file")));
    assert!(done.out == bytes && done.end.int("size") == Some(3_000_000));
    let part = path(host.at("new/dir/file")).uint("offset", 70_000).uint("length", 200_000);
    assert!(client.call("fs.read", &part).out == bytes[70_000..270_000]);
    let beyond = path(host.at("new/dir/file")).uint("offset", 1 << 40);
    assert_eq!(client.call("fs.read", &beyond).end.int("size"), Some(0));
    let limit = path(host.at("new/dir/file")).uint("max_bytes", 2_999_999);
    let done = client.call("fs.read", &limit);
    assert_eq!((done.end.error(), done.out.len()), ("too_large", 0));
    let end = client.put("fs.write", &path(host.at("suid")).uint("mode", 0o4755), b"");
    assert_eq!(end.get("entry").unwrap().int("mode"), Some(0o4755));
    assert_eq!(temporaries(&host), 0);
}

#[test]
fn an_upload_under_way_is_in_no_listing_and_no_archive() {
    let host = Host::start();
    let mut client = host.connect();
    assert_eq!(write(&mut client, host.at("whole"), b"1").error(), "");
    // Names that only look like the daemon's are somebody's own.
    for own in [".asb-x.tmp", ".asb-00000000000000AF.tmp", ".asb-0123456789abcdef0.tmp"] {
        fs::write(host.file(own), b"").unwrap();
    }
    fs::create_dir(host.file(".asb-0123456789abcdef.tmp")).unwrap();
    let id = client.open("fs.write", &path(host.at("half")).uint("mode", 0o644));
    assert!(client.upload(id, 0, b"some"));
    until("the upload has begun", || temporaries(&host) == 5);
    let expected: HashSet<&[u8]> = [
        &b"whole"[..],
        b".asb-x.tmp",
        b".asb-00000000000000AF.tmp",
        b".asb-0123456789abcdef0.tmp",
        b".asb-0123456789abcdef.tmp",
    ]
    .into();
    let done = client.call("fs.list", &path(host.at("")));
    assert_eq!(done.end.int("count"), Some(5));
    let listed = entries(&done.out);
    let names = listed.iter().map(|entry| match entry.get("name") {
        Some(Item::Bin(name)) => &name[..],
        other => panic!("{other:?}"),
    });
    assert_eq!(names.collect::<HashSet<_>>(), expected);
    let done = client.call("tar.export", &path(host.at("")).uint("max_bytes", 1_000));
    assert_eq!((done.end.int("entries"), done.end.int("skipped_total")), (Some(6), Some(0)));
    assert_eq!(temporaries(&host), 5, "it was there all the time");
    client.eof(id);
    assert_eq!(client.finish(id).end.error(), "");
    assert_eq!(client.call("fs.list", &path(host.at(""))).end.int("count"), Some(6));
}

#[test]
fn odd_names_list_as_they_are() {
    let host = Host::start();
    let mut client = host.connect();
    let names: [&[u8]; 6] = [b"sp ace", b"new\nline", b"quote'\"", b"%2F", "é🎈".as_bytes(), b"\xff\xfe"];
    for name in names {
        let to = [&host.at(""), name].concat();
        assert_eq!(write(&mut client, &to, name).error(), "");
        assert_eq!(client.call("fs.read", &path(&to)).out, name);
    }
    symlink("/nowhere", host.file(".dangling")).unwrap();
    let done = client.call("fs.list", &path(host.at("")));
    assert_eq!(done.end.int("count"), Some(7));
    let mut found = Vec::new();
    for entry in entries(&done.out) {
        let (Some(Item::Bin(name)), Some(Item::Bin(full))) = (entry.get("name"), entry.get("path")) else {
            panic!("{entry:?}");
        };
        assert!(full.ends_with(name) && !full.windows(2).any(|pair| pair == b"//"));
        let kind = if name == b".dangling" { "symlink" } else { "file" };
        assert_eq!(entry.text("type"), Some(kind));
        found.push(name.clone());
    }
    assert!(names.iter().all(|name| found.contains(&name.to_vec())));
    let link = path(host.at(".dangling"));
    assert_eq!(client.call("fs.stat", &link).end.error(), "not_found");
    let end = client.call("fs.stat", &link.bool("follow", false)).end;
    assert_eq!(end.get("entry").unwrap().text("type"), Some("symlink"));
}

#[test]
fn a_large_directory_streams() {
    let host = Host::start();
    let mut client = host.connect();
    for n in 0..5_000 {
        fs::write(host.file(&format!("{n:04}-{}", "x".repeat(100))), b"").unwrap();
    }
    let done = client.call("fs.list", &path(host.at("")));
    assert_eq!(done.end.int("count"), Some(5_000));
    assert_eq!(entries(&done.out).len(), 5_000);
}

#[test]
fn no_read_hangs_and_no_window_opens() {
    let host = Host::start();
    let mut client = host.connect();
    let done = client.shell(&format!("mkfifo {}", host.file("fifo").display()));
    assert_eq!(done.end.int("code"), Some(0));
    symlink("/proc/self/environ", host.file("environ")).unwrap();
    symlink("/proc/self/root/etc/hostname", host.file("magic")).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(host.file("socket")).unwrap();
    for file in ["fifo", "environ", "magic", "socket", ""] {
        assert_eq!(client.call("fs.read", &path(host.at(file))).end.error(), "invalid_request", "{file}");
    }
    for file in ["/dev/zero", "/proc/self/status", "/proc/1/environ", "/sys/kernel/notes", "/proc/self/mem"] {
        let end = client.call("fs.read", &path(file)).end;
        assert!(matches!(end.error(), "invalid_request" | "permission" | "not_found"), "{file}: {end:?}");
    }
    assert_eq!(client.call("fs.read", &path("/etc/shadow")).end.error(), "permission");
    assert_eq!(client.call("fs.read", &path("/no/such")).end.error(), "not_found");
    assert_eq!(client.call("fs.list", &path("/etc/passwd")).end.error(), "invalid_request");
    assert_eq!(client.call("fs.list", &path("/root")).end.error(), "permission");
    let tmp = host.place.join("note");
    fs::write(&tmp, b"readable").unwrap();
    assert_eq!(client.call("fs.read", &path(tmp.to_str().unwrap())).out, b"readable");
}

#[test]
fn a_write_stays_in_the_workspace() {
    let host = Host::start();
    let mut client = host.connect();
    symlink("/etc", host.file("etc")).unwrap();
    symlink("/tmp/asb-not-there", host.file("dangling")).unwrap();
    symlink(host.file("inner"), host.file("absolute")).unwrap();
    fs::create_dir(host.file("inner")).unwrap();
    std::os::unix::fs::chown(host.file("inner"), Some(host.uid), Some(host.uid)).unwrap();
    for to in ["etc/asb-evil", "dangling", "inner", "", "../x", "inner/../../x", "file/"] {
        assert_eq!(write(&mut client, host.at(to), b"evil").error(), "invalid_request", "{to}");
    }
    assert_eq!(write(&mut client, "/tmp/asb-evil", b"evil").error(), "invalid_request");
    assert!(!fs::exists("/etc/asb-evil").unwrap() && !fs::exists("/tmp/asb-not-there").unwrap());
    assert_eq!(write(&mut client, host.at("absolute/f"), b"good").error(), "");
    assert_eq!(fs::read(host.file("inner/f")).unwrap(), b"good");
    fs::create_dir(host.file("roots")).unwrap();
    assert_eq!(write(&mut client, host.at("roots/f"), b"x").error(), "permission");
    assert_eq!(write(&mut client, host.at(&"n".repeat(300)), b"x").error(), "invalid_request");
    assert_eq!(temporaries(&host), 0);
}

#[test]
fn an_upload_that_stops_leaves_nothing() {
    let host = Host::start();
    let mut client = host.connect();
    let args = path(host.at("file")).uint("mode", 0o644);
    let id = client.open("fs.write", &args);
    client.upload(id, 0, &[1; 100_000]);
    until("it has begun", || temporaries(&host) == 1);
    client.reset(id);
    until("it is gone", || temporaries(&host) == 0);
    let id = client.open("fs.write", &args);
    client.upload(id, 0, &[1; 100_000]);
    drop(client);
    until("it is gone", || temporaries(&host) == 0);
    assert!(!host.file("file").exists());
}

#[test]
fn uploads_into_one_new_directory_and_half_files() {
    let host = Host::start();
    let contents = [vec![b'a'; 300_000], vec![b'b'; 300_000]];
    std::thread::scope(|scope| {
        for content in &contents {
            scope.spawn(|| {
                let mut client = host.connect();
                for n in 0..30 {
                    assert_eq!(write(&mut client, host.at(&format!("d{n}/sub/same")), content).error(), "");
                }
            });
        }
        scope.spawn(|| {
            let mut client = host.connect();
            for n in (0..30).cycle().take(300) {
                let done = client.call("fs.read", &path(host.at(&format!("d{n}/sub/same"))));
                assert!(done.end.error() == "not_found" || contents.contains(&done.out));
            }
        });
    });
}

#[test]
fn five_slow_uploads_hold_no_thread() {
    let host = Host::start();
    let mut client = host.connect();
    let slow: Vec<_> = (0..20)
        .map(|n| {
            let id = client.open("fs.write", &path(host.at(&format!("slow{n}"))).uint("mode", 0o600));
            client.upload(id, 0, b"half");
            id
        })
        .collect();
    assert_eq!(write(&mut client, host.at("fast"), b"x").error(), "");
    for id in slow {
        client.eof(id);
        assert_eq!(client.finish(id).end.error(), "");
    }
}

#[test]
fn a_workspace_moves() {
    let (from, to) = (Host::start(), Host::start());
    let (mut source, mut sink) = (from.connect(), to.connect());
    let script = format!(
        "cd {}; mkdir d; head -c 2000000 /dev/urandom > d/f; ln d/f hard; chmod 0 d; ln -s /x link",
        from.file("").display()
    );
    assert_eq!(source.shell(&script).end.int("code"), Some(0));
    let limit = |n: u64| Args::new().uint("max_bytes", n);
    let done = source.call("tar.export", &limit(1 << 30));
    assert_eq!((done.end.int("entries"), done.end.int("file_bytes")), (Some(5), Some(2_000_000)));
    assert_eq!(source.call("tar.export", &limit(1_999_999)).end.error(), "too_large");
    // More at once than there are threads, and two that go away in the middle.
    let ids: Vec<_> = (0..5).map(|_| source.open("tar.export", &limit(1 << 30))).collect();
    source.reset(ids[0]);
    source.reset(ids[3]);
    for id in [1, 2, 4] {
        assert!(source.finish(ids[id]).out == done.out);
    }
    let end = sink.put("tar.import", &limit(1 << 30), &done.out);
    assert_eq!((end.int("entries"), end.int("file_bytes")), (Some(5), Some(2_000_000)));
    assert!(sink.call("tar.export", &limit(1 << 30)).out == done.out);
    assert_eq!(fs::symlink_metadata(to.file("link")).unwrap().uid(), to.uid);
    assert_eq!(fs::metadata(to.file("hard")).unwrap().nlink(), 2);
    assert_eq!(sink.put("tar.import", &limit(1_000), &done.out).error(), "too_large");
    assert_eq!(sink.put("tar.import", &limit(1 << 30), b"no archive").error(), "invalid_request");
    // An import without its end does nothing more once the client has gone, and frees its thread.
    for _ in 0..3 {
        let mut client = to.connect();
        let id = client.open("tar.import", &limit(1 << 30));
        client.upload(id, 0, &done.out[..10_000]);
    }
    assert_eq!(sink.put("tar.import", &limit(1 << 30), &done.out).error(), "");
}
