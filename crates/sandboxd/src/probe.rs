//! `sandboxd probe`: what an unknown platform offers, seen from inside, before any backend exists for it.
//!
//! One static file is uploaded and started; it asks for no configuration, listens nowhere and changes nothing. What
//! could change something (mounts, namespaces, another user) is tried in a child that is thrown away, in a mount
//! namespace of its own. Every attempt has [`attempts::SECONDS`], all of them together [`TOTAL_SECONDS`], every
//! text [`MAX_DETAIL`] characters. Items are those of the backends' checklist; what only the platform's own API can
//! show is said to be outside. No value of the environment is told.

mod attempts;
mod looks;

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// All attempts together: a platform's own exec call is often given up after half a minute.
const TOTAL_SECONDS: u64 = 20;
/// A file of `/proc` may be long where the platform is hostile or odd.
const MAX_DETAIL: usize = 300;
const FORMAT: u32 = 1;

/// What a finding says: it is there, it is not, a person has to judge, or it cannot be seen from inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    Yes,
    No,
    Look,
    Outside,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Verdict::Yes => "yes",
            Verdict::No => "no",
            Verdict::Look => "look",
            Verdict::Outside => "outside",
        }
    }
}

pub struct Finding {
    pub item: &'static str,
    pub check: &'static str,
    pub verdict: Verdict,
    pub detail: String,
}

impl Finding {
    pub fn new(
        item: &'static str,
        check: &'static str,
        verdict: Verdict,
        detail: impl Into<String>,
    ) -> Finding {
        Finding { item, check, verdict, detail: detail.into().chars().take(MAX_DETAIL).collect() }
    }
}

/// Look, and print a report: one JSON document, or a line for each finding.
pub fn run(json: bool) -> ExitCode {
    let deadline = Instant::now() + Duration::from_secs(TOTAL_SECONDS);
    let mut findings = looks::all();
    findings.extend(attempts::all(deadline));
    findings.extend(outside());
    findings.sort_by_key(|finding| number(finding.item));
    let platform = looks::platform();
    let text = if json { as_json(&platform, &findings) } else { as_lines(&platform, &findings) };
    match std::io::stdout().lock().write_all(text.as_bytes()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

fn outside() -> Vec<Finding> {
    [
        ("B1", "pinned content, one full id"),
        ("B5", "the output of a failed start"),
        ("B12", "delete by exact id"),
        ("B13", "found again after a restart"),
        ("B16", "what a failed call says"),
        ("B17", "where the platform keeps what it is given"),
    ]
    .into_iter()
    .map(|(item, check)| Finding::new(item, check, Verdict::Outside, "ask the platform's own API"))
    .collect()
}

fn number(item: &str) -> u32 {
    item.trim_start_matches(|letter: char| !letter.is_ascii_digit()).parse().unwrap_or(u32::MAX)
}

fn as_json(platform: &[(&str, String)], findings: &[Finding]) -> String {
    let mut text = format!("{{\"format\": {FORMAT}, \"sandboxd\": {},\n", quoted(env!("CARGO_PKG_VERSION")));
    let facts: Vec<String> =
        platform.iter().map(|(name, value)| format!("{}: {}", quoted(name), quoted(value))).collect();
    let _ = writeln!(text, " \"platform\": {{{}}},\n \"checks\": [", facts.join(", "));
    let checks: Vec<String> = findings
        .iter()
        .map(|finding| {
            format!(
                "  {{\"item\": {}, \"check\": {}, \"verdict\": {}, \"detail\": {}}}",
                quoted(finding.item),
                quoted(finding.check),
                quoted(finding.verdict.name()),
                quoted(&finding.detail)
            )
        })
        .collect();
    text + &checks.join(",\n") + "\n]}\n"
}

fn as_lines(platform: &[(&str, String)], findings: &[Finding]) -> String {
    let mut text = String::new();
    for (name, value) in platform {
        let _ = writeln!(text, "{name} {}", plain(value));
    }
    for finding in findings {
        let _ = writeln!(
            text,
            "{:<4} {:<8} {}: {}",
            finding.item,
            finding.verdict.name(),
            finding.check,
            plain(&finding.detail)
        );
    }
    text
}

/// The text on one line, with nothing in it that a terminal would obey.
fn plain(text: &str) -> String {
    text.chars().map(|char| if char.is_control() { '?' } else { char }).collect()
}

/// A JSON string (RFC 8259, section 7).
fn quoted(text: &str) -> String {
    let mut out = String::from("\"");
    for char in text.chars() {
        match char {
            '"' | '\\' => out.extend(['\\', char]),
            char if u32::from(char) < 0x20 => {
                let _ = write!(out, "\\u{:04x}", u32::from(char));
            }
            char => out.push(char),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_json_whatever_the_platform_says() {
        let odd = "a\"b\\c\nd\u{1}é";
        let findings = [
            Finding::new("B4", "x", Verdict::No, odd),
            Finding::new("B2", "y", Verdict::Look, "z".repeat(999)),
        ];
        let value: serde_json::Value =
            serde_json::from_str(&as_json(&[("kernel", odd.into())], &findings)).unwrap();
        assert_eq!(value["format"], 1);
        assert_eq!(value["platform"]["kernel"], odd);
        assert_eq!(value["checks"][0]["detail"], odd);
        assert_eq!(value["checks"][0]["verdict"], "no");
        assert_eq!(value["checks"][1]["detail"].as_str().unwrap().len(), MAX_DETAIL);
        assert!(as_lines(&[], &findings).starts_with("B4   no       x: a\"b\\c?d?é\n"));
    }

    #[test]
    fn every_item_of_the_checklist_is_told() {
        let mut told: Vec<u32> = looks::all()
            .iter()
            .chain(&attempts::all(Instant::now()))
            .chain(&outside())
            .map(|finding| number(finding.item))
            .collect();
        told.sort_unstable();
        told.dedup();
        assert_eq!(told, (1..=17).collect::<Vec<u32>>());
    }

    #[test]
    fn nothing_is_tried_after_the_deadline() {
        for finding in attempts::all(Instant::now()) {
            assert_eq!((finding.verdict, finding.detail.as_str()), (Verdict::Look, "not tried: time is up"));
        }
    }
}
