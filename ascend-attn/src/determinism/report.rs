//! The report on a case and its variations, as text and as JSON.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Value, json};

use super::rows::Difference;
use crate::report::{counted, number};

/// The findings on one case.
pub(super) struct CaseReport {
    file: PathBuf,
    stem: String,
    pub(super) sequences: usize,
    pub(super) heads: usize,
    pub(super) found: Vec<Found>,
    /// Why the case was not computed as it stands.
    pub(super) failure: Option<String>,
    /// Why the case was not tried.
    pub(super) skipped: Option<String>,
}

/// The finding on one variation: how its rows differ, or why it cannot be computed.
pub(super) struct Found {
    name: String,
    difference: Result<Difference, String>,
}

impl Found {
    pub(super) fn new(name: String, difference: Result<Difference, String>) -> Self {
        Self { name, difference }
    }

    fn json(&self) -> Value {
        match &self.difference {
            Err(reason) => json!({ "name": self.name, "verdict": "impossible", "reason": reason }),
            Ok(difference) => json!({
                "name": self.name,
                "verdict": if difference.differing == 0 { "same" } else { "differs" },
                "rows": difference.rows,
                "differing": difference.differing,
                "ulps": difference.ulps,
                "distance": number(difference.distance),
                "first": difference.first.map(|first| json!({
                    "output": first.output,
                    "sequence": first.sequence,
                    "token": first.token,
                    "head": first.head,
                    "element": first.element,
                    "before": number(f64::from(first.before)),
                    "after": number(f64::from(first.after)),
                })),
            }),
        }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "  {:<26}", self.name)?;
        let difference = match &self.difference {
            Err(reason) => return write!(f, "impossible: {reason}"),
            Ok(difference) => difference,
        };
        let Some(first) = difference.first else {
            return write!(f, "same in all {} rows", difference.rows);
        };
        write!(
            f,
            "{} of {} rows differ; largest distance {:.2e}",
            difference.differing, difference.rows, difference.distance
        )?;
        if difference.ulps > 0 {
            write!(f, ", {} ulp", difference.ulps)?;
        }
        write!(
            f,
            "; first: {} of sequence {}, token {}, head {}, element {}: {} became {}",
            first.output, first.sequence, first.token, first.head, first.element, first.before, first.after
        )
    }
}

impl CaseReport {
    pub(super) fn new(file: &Path, stem: String) -> Self {
        Self { file: file.to_owned(), stem, sequences: 0, heads: 0, found: Vec::new(), failure: None, skipped: None }
    }

    /// The name of an earlier variation that is impossible for the same reason as this one.
    fn said_at(&self, at: usize) -> Option<&str> {
        let why = self.found.get(at)?.difference.as_ref().err()?;
        let mut before = self.found.iter().take(at);
        let before = before.find(|found| found.difference.as_ref().err() == Some(why));
        before.map(|found| found.name.as_str())
    }

    pub(super) fn json(&self) -> Value {
        json!({
            "file": self.file.to_string_lossy(),
            "failure": self.failure,
            "skipped": self.skipped,
            "sequences": self.sequences,
            "heads": self.heads,
            "variations": self.found.iter().map(Found::json).collect::<Vec<_>>(),
        })
    }
}

impl fmt::Display for CaseReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(failure) = &self.failure {
            return write!(f, "{}  FAIL  {failure}", self.stem);
        }
        if let Some(skipped) = &self.skipped {
            return write!(f, "{}  skipped: {skipped}", self.stem);
        }
        write!(f, "{}  sequences: {}, heads: {}", self.stem, self.sequences, self.heads)?;
        for (at, found) in self.found.iter().enumerate() {
            writeln!(f)?;
            match self.said_at(at) {
                Some(before) => write!(f, "  {:<26}impossible for the same reason as {before}", found.name)?,
                None => found.fmt(f)?,
            }
        }
        Ok(())
    }
}

/// Counts of cases and variations by result.
#[derive(Default, Serialize)]
pub(super) struct Tally {
    cases: usize,
    pub(super) failed: usize,
    skipped: usize,
    same: usize,
    pub(super) differing: usize,
    impossible: usize,
}

impl Tally {
    pub(super) fn count(&mut self, report: &CaseReport) {
        self.cases += 1;
        self.failed += usize::from(report.failure.is_some());
        self.skipped += usize::from(report.skipped.is_some());
        for found in &report.found {
            *match &found.difference {
                Ok(difference) if difference.differing == 0 => &mut self.same,
                Ok(_) => &mut self.differing,
                Err(_) => &mut self.impossible,
            } += 1;
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, {} failed, {} skipped; variations: {} the same, {} differ, {} impossible",
            counted(self.cases, "case", "cases"),
            self.failed,
            self.skipped,
            self.same,
            self.differing,
            self.impossible
        )
    }
}
