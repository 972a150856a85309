//! The messages in a text: what the checks of a call wrote, without what logs, tracebacks and frameworks put around it.

use super::borders::has_word;
use super::operator_names::{is_function, of_function, of_type};
use super::words::words;

/// The messages of a text.
#[derive(Debug, Default)]
pub(super) struct Messages {
    pub(super) lines: Vec<String>,
    /// The function of the check that wrote them.
    pub(super) function: Option<String>,
    /// Whether they are marked as CANN's or this library's own: otherwise they are all lines of the text that may be
    /// messages.
    pub(super) are_marked: bool,
}

/// The most lines that are read: those behind the first mark, without one the last.
const MOST_LINES: usize = 2000;
/// The least number of words in a line that says something of a call.
const TELLING: usize = 2;

/// What names a line that says no more than that some call failed, or that an operator elsewhere was not registered.
const EMPTY: [&str; 5] =
    ["NPU function error", "[InitOpInfoLib]", "ERR0*", "call acl api failed", "Inner error is reported"];

/// Finds the messages. If a line has CANN's mark, the message is the first line from there on that describes the call;
/// later lines only repeat the failure. Without a mark every line outside of tracebacks counts.
pub(super) fn messages(text: &str) -> Messages {
    let lines = telling_lines(text);
    let marked = lines.iter().position(|line| is_marked(line));
    let from = marked.unwrap_or(lines.len().saturating_sub(MOST_LINES));
    let lines = &lines[from..lines.len().min(from + MOST_LINES)];
    let says = |line: &str| content(line).is_some_and(|message| words(&message).len() >= TELLING);
    let first = lines.iter().position(|line| says(line));
    let first = first.filter(|_| marked.is_some());
    let Some(first) = first else {
        return Messages {
            lines: lines.iter().filter_map(|line| content(line)).collect(),
            function: None,
            are_marked: marked.is_some(),
        };
    };
    // A message that is broken into lines ends with the place in CANN's source.
    let is_whole = lines[first].contains("[FUNC:") || after_code(lines[first]).is_none();
    let rest = lines[first + 1..].iter().take_while(|line| !is_whole && after_code(line).is_none()).take(1);
    let message: Vec<&str> = [lines[first]].into_iter().chain(rest.copied()).collect();
    Messages {
        lines: message.iter().filter_map(|line| content(line)).collect(),
        function: lines[first..].iter().find_map(|line| function(line)),
        are_marked: true,
    }
}

/// The lines of a text but those of tracebacks, with the code behind the place of each frame, and those that say no
/// more than that something failed.
fn telling_lines(text: &str) -> Vec<&str> {
    let mut is_code = false;
    let is_empty = |line: &str| EMPTY.iter().any(|empty| has_word(line, empty));
    let lines = text.lines().filter(|line| {
        let is_shown = std::mem::replace(&mut is_code, has_word(line, FRAME_PLACE)) && !is_marked(line);
        !is_shown && !is_frame(line) && !is_empty(line)
    });
    lines.collect()
}

/// Whether a line has a mark of a message: an error code, the place in CANN's source, or what this library ends with.
fn is_marked(line: &str) -> bool {
    line.contains("[FUNC:") || has_word(line, "fix: ") || after_code(line).is_some()
}

/// What follows the last error code of a line, such as `EZ9999`: an E, a letter or a digit, and four digits.
fn after_code(line: &str) -> Option<&str> {
    let mut starts = line.match_indices('E').filter_map(|(at, _)| {
        let code = line.get(at..at + 6)?;
        let digits = code.get(2..)?;
        let is_code = code.chars().nth(1).is_some_and(|c| c.is_ascii_alphanumeric())
            && digits.chars().all(|c| c.is_ascii_digit());
        let bounded = !line[..at].ends_with(|c: char| c.is_alphanumeric())
            && !line[at + 6..].starts_with(|c: char| c.is_alphanumeric());
        (is_code && bounded).then_some(at + 6)
    });
    Some(&line[starts.next_back()?..])
}

/// What a line of a traceback has, which names files and functions and no arguments.
const FRAME: [&str; 8] = [
    FRAME_PLACE,
    "Traceback (*",
    "TraceBack (*",
    "^^^*",
    "frame #*",
    "Exception raised from",
    "self.*",
    "= torch_npu.*",
];

/// What the line of a frame has that names the place of the code on the next line.
const FRAME_PLACE: &str = "File \"*";

/// Whether a line is of a traceback.
fn is_frame(line: &str) -> bool {
    FRAME.iter().any(|part| has_word(line, part))
}

/// The function of the check that wrote a line.
fn function(line: &str) -> Option<String> {
    let (_, after) = line.split_once("[FUNC:")?;
    let name = after.split(']').next()?;
    // The checks begin with what they do; other functions of a traceback only pass the failure on.
    name.strip_prefix("Check").map(str::to_owned)
}

/// The part of a line that is the message, without places, times, numbers of processes and the functions it names.
fn content(line: &str) -> Option<String> {
    let line = after_log(line);
    let line = after_code(line).unwrap_or(line);
    let line = line.trim_start_matches([':', ' ']);
    let line = line.strip_prefix("Inner Error!").unwrap_or(line);
    let line = line.split_once("[FUNC:").map_or(line, |(message, _)| message);
    let line = line.split_once("[FILE:").map_or(line, |(message, _)| message);
    let mut message = String::new();
    let mut before = "";
    let mut is_given = false;
    for chunk in line.split_whitespace() {
        // What a call was given is no bound: `got 1`, `= 71,`, `is [16, 1, 1, 1500].`
        let follows = matches!(before.trim_end_matches(':'), "got" | "is" | "=" | "was" | "are");
        let is_value = chunk.trim_start_matches('[').starts_with(|c: char| c.is_ascii_digit());
        is_given = (is_given || follows) && is_value;
        before = chunk;
        if is_given || is_place(chunk) {
            is_given &= !chunk.contains(']') && chunk.ends_with(',') && line.contains('[');
            continue;
        }
        let names = without_given(chunk);
        for name in names.split(|c: char| !(c.is_alphanumeric() || c == '_')) {
            let is_operator = of_function(name).is_some() || of_type(name).is_some() || is_function(name);
            if !is_operator && !name.is_empty() {
                message.push(' ');
                message.push_str(name);
            }
        }
    }
    (!message.is_empty()).then_some(message)
}

/// What stands behind the prefix of a log, which ends with a place: `ERROR 01-21 05:41:35 [executor.py:822] `.
fn after_log(line: &str) -> &str {
    let place = line.match_indices("] ").find(|&(end, _)| {
        let place = line[..end].rsplit_once(".py:").map(|(_, number)| number);
        place.is_some_and(|number| !number.is_empty() && number.chars().all(|c| c.is_ascii_digit()))
    });
    place.map_or(line, |(end, found)| &line[end + found.len()..])
}

/// What a chunk has that says where or when, and not what: a path, a process.
const PLACE: [&str; 12] =
    [".cpp", ".cc", ".py", ".so", ".ts", "::*", "/lib*", "pid=*", "PID:*", "RankID", "Device:*", "[rank*"];

/// Whether a chunk says where or when, and not what: a place as above, or a time.
fn is_place(chunk: &str) -> bool {
    let digits = chunk.chars().filter(char::is_ascii_digit).count();
    let marks = chunk.chars().filter(|c| matches!(c, '-' | ':' | '.')).count();
    PLACE.iter().any(|part| has_word(chunk, part))
        || digits >= 4 && marks >= 2 && digits + marks + 2 >= chunk.chars().count()
        || chunk.ends_with(']') && digits >= 2 && digits + 1 == chunk.chars().count()
}

/// A chunk without the values that stand in brackets behind names: `queryT(8)`, `B=[1]`.
fn without_given(chunk: &str) -> String {
    let mut rest = chunk;
    let mut kept = String::new();
    while let Some(open) = rest.find(['(', '[']) {
        let inside = &rest[open + 1..];
        let close = inside.find([')', ']']).unwrap_or(inside.len());
        let is_value = open > 0 && inside[..close].chars().all(|c| c.is_ascii_digit());
        kept.push_str(&rest[..open]);
        kept.push(' ');
        if !is_value {
            kept.push_str(&inside[..close]);
            kept.push(' ');
        }
        rest = inside.get(close + 1..).unwrap_or("");
    }
    kept.push_str(rest);
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn first(text: &str) -> String {
        messages(text).lines.join("|")
    }

    #[test]
    fn the_first_line_that_says_something_is_the_message() {
        let text = "(Worker_0 pid=7) ERROR 02-03 04:05:06 [run.py:8] NPU function error: call \
                    aclnnFooV3 failed, error code 561002\n\
                    (Worker_0 pid=7) ERROR 02-03 04:05:06 [run.py:8] EZ9999: Inner Error!\n\
                    EZ9999[PID: 7] 2026-02-03-04:05:06.000.007 (EZ9999):  the head dimension queryD(80) is \
                    odd[FUNC:CheckDim][FILE:a.cpp]\n\
                    TraceBack (most recent call last):\n\
                    tiling of the mask shape failed[FUNC:Pass][FILE:b.cpp]";
        let found = messages(text);
        assert_eq!(found.lines, [" the head dimension queryD is odd"]);
        assert_eq!(found.function.as_deref(), Some("Dim"));
        assert!(found.are_marked);
    }

    #[test]
    fn marks_and_frames_are_whole_words() {
        assert!(!messages("the prefix: 3 rows\nby itself. done").are_marked);
        assert!(messages("a.rule: it holds; fix: give 3 rows").are_marked);
        assert_eq!(first("the mask by itself. is the scale"), " the mask by itself is the scale");
        assert_eq!(first("self.attn(mask, scale)"), "");
    }

    #[test]
    fn code_of_frames_is_no_message() {
        let frame = "  File \"a.py\", line 1, in f\n    out = attend(mask, scale)\n          ^^^^^^\n";
        assert_eq!(first(&format!("{frame}the block size")), " the block size");
        let message = "  File \"a.py\", line 1, in f\nEZ9999: the block size";
        assert_eq!(first(message), " the block size");
    }

    #[test]
    fn prefixes_of_logs_are_no_message() {
        for prefix in ["ERROR 04-10 11:26:01 engine.py:140] ", "(W pid=7) ERROR 01-21 05:41:35 [a.py:822] "] {
            assert_eq!(after_log(&format!("{prefix}the mask")), "the mask");
        }
        assert_eq!(after_log("[a.py:x] the mask"), "[a.py:x] the mask");
    }

    #[test]
    fn a_message_may_be_broken_into_lines() {
        let text = "EZ9999: the block size\n is 16 wide[FUNC:Check][FILE:a.cpp]\nmask shape";
        assert_eq!(first(text), " the block size| is wide");
    }

    #[test]
    fn values_of_the_call_are_no_bounds() {
        assert_eq!(first("blockSize is 24, multiple of 16"), " blockSize is multiple of 16");
        assert_eq!(first("B=[4], shape is [2, 1, 64, 64] of mask"), " B shape is of mask");
        assert_eq!(first("heads of {32, 64}"), " heads of 32 64");
    }

    #[test]
    fn places_and_broken_codes_say_nothing() {
        assert_eq!(first("at a/b/c.cpp:12 [PID: 123] 2026-02-03-04:05:06.7 scale"), " at scale");
        for text in ["E", "EZ99", "é EZ9999", "EZ99999 E1", "[FUNC:", "(", "[[((", "é.py:] é.py:1] é"] {
            messages(text);
        }
    }
}
