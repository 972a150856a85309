//! The statuses that a text names, as the tables of the C ABI have them.

use std::fmt;

use ascend_attention::spec::API_ERROR;
use ascend_attention::{AclStatus, AclnnStatus};

use super::borders::is_of_word;

/// A status of a function of CANN: of an operator's, or of the runtime's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Status(pub(super) i32);

impl Status {
    /// Whether a function of an operator returns it, which refuses a call before anything is launched.
    pub(super) fn is_refusal(self) -> bool {
        self.0 == API_ERROR || AclnnStatus(self.0).name().is_some()
    }

    fn name(self) -> Option<&'static str> {
        AclnnStatus(self.0).name().or(AclStatus(self.0).name())
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match AclnnStatus(self.0).name() {
            Some(_) => AclnnStatus(self.0).fmt(f),
            None => AclStatus(self.0).fmt(f),
        }
    }
}

/// The codes of CANN but [`API_ERROR`], which begin with 1 for a caller's fault to 5 for an inner one.
const CODES: std::ops::Range<i32> = 100_000..600_000;
/// The thousands of the codes that a text may have alone. Others are ordinary numbers more often than statuses.
const FAMILIES: [i32; 6] = [107, 161, 207, 361, 507, 561];

/// The statuses that a text names, by number or by name, in its order and each once.
pub(super) fn statuses(text: &str) -> Vec<Status> {
    let mut statuses: Vec<Status> = Vec::new();
    let mut start = 0;
    for word in text.split(|c: char| !is_of_word(c)) {
        let status = by_number(&text[..start], word).or_else(|| by_name(word));
        if let Some(status) = status.filter(|status| !statuses.contains(status)) {
            statuses.push(status);
        }
        start += word.len();
        start += text[start..].chars().next().map_or(0, char::len_utf8);
    }
    statuses
}

/// The status that a number is, by its value and by what stands before it: `error code is 561002`, `errno:561002`.
fn by_number(before: &str, word: &str) -> Option<Status> {
    if !word.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    let number: i64 = word.parse().ok()?;
    let is_called_status = is_called_status(before.trim_end_matches('-'));
    if number == i64::from(u32::MAX) || number == 1 && before.ends_with('-') {
        return is_called_status.then_some(Status(API_ERROR));
    }
    let code = i32::try_from(number).ok()?;
    let is_fraction = before.ends_with('.');
    let is_known = Status(code).name().is_some() && FAMILIES.contains(&(code / 1000)) && code % 1000 != 0;
    (CODES.contains(&code) && !is_fraction && (is_known || is_called_status)).then_some(Status(code))
}

/// Whether a text ends with what introduces a status.
fn is_called_status(before: &str) -> bool {
    let before = before.trim_end_matches([' ', ':', '=', '(']);
    let before = before.strip_suffix(" is").unwrap_or(before);
    let word = before.rsplit(|c: char| !is_of_word(c)).next().unwrap_or("");
    let word = word.to_lowercase();
    ["code", "errno", "status", "result"].iter().any(|end| word.ends_with(end))
}

fn by_name(word: &str) -> Option<Status> {
    if !["ACL_ERROR_", "ACLNN_ERR_"].iter().any(|prefix| word.starts_with(prefix)) {
        return None;
    }
    CODES.map(Status).find(|status| status.name() == Some(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn codes(text: &str) -> Vec<i32> {
        statuses(text).into_iter().map(|status| status.0).collect()
    }

    #[test]
    fn statuses_are_read_by_number_and_by_name() {
        assert_eq!(codes("error code is 561002, errno:561103."), [561_002, 561_103]);
        assert_eq!(codes("failed: 507015 (a.cpp:10), 507015"), [507_015]);
        assert_eq!(codes("ACLNN_ERR_PARAM_INVALID or ACL_ERROR_RT_CONTEXT_NULL"), [161_002, 107_002]);
        assert_eq!(codes("errorCode = 507999, é runtime result = 100024"), [507_999, 100_024]);
        assert_eq!(Status(561_002).to_string(), "561002 (ACLNN_ERR_INNER_TILING_ERROR)");
        assert_eq!(Status(507_015).to_string(), "507015 (ACL_ERROR_RT_AICORE_EXCEPTION)");
    }

    #[test]
    fn the_status_without_a_name_is_read_as_signed_and_as_unsigned() {
        for text in ["error code is -1", "error code is 4294967295", "status: -1", "errno:4294967295"] {
            assert_eq!(codes(text), [API_ERROR], "{text}");
        }
        assert!(Status(API_ERROR).is_refusal() && !Status(507_015).is_refusal());
    }

    #[test]
    fn other_numbers_are_no_statuses() {
        for text in [
            "RankID:-1, pre_tokens -1, ret is -1",
            "size 4294967295",
            "100000 tokens of 107000, 207000.5 and 0.507015",
            "1507015, 5070150, a507015, error code is 6",
            "error code = 99999999999999999999",
        ] {
            assert_eq!(codes(text), [0; 0], "{text}");
        }
    }
}
