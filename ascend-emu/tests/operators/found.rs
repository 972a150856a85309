//! What a test expects among the findings.

use ascend_emu::{FindingKind, findings};

/// Asserts that the findings from number `seen` on have one of this kind with these texts.
#[track_caller]
pub(crate) fn assert_found(seen: usize, kind: FindingKind, texts: &[&str]) {
    let found = findings();
    let mut news = found[seen..].iter();
    let is_it =
        |finding: &ascend_emu::Finding| finding.kind == kind && texts.iter().all(|text| finding.message.contains(text));
    assert!(news.any(is_it), "{kind:?}, {texts:?}: {:?}", &found[seen..]);
}

/// Whether the findings from number `seen` on have one of this kind with this text.
pub(crate) fn has_found(seen: usize, kind: FindingKind, text: &str) -> bool {
    let found = findings();
    let mut found = found[seen..].iter();
    found.any(|finding| finding.kind == kind && finding.message.contains(text))
}
