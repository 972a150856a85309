//! `ascend-attn check` with `--cann all` or `--soc all`: a table of verdicts.

use std::fmt::Write as _;

use ascend_attention::spec::{Cann, Soc};

use super::Checked;
use crate::Stop;
use crate::output::Output;

/// Prints the verdicts on one call: a row for each product, a column for each release, and below them the rules that
/// refuse it.
pub(super) fn print(all: &[Checked], output: &mut Output) -> Result<(), Stop> {
    let mut canns: Vec<Cann> = all.iter().map(|checked| checked.target.cann).collect();
    canns.sort_unstable();
    canns.dedup();
    let mut socs: Vec<Soc> = Vec::new();
    for checked in all {
        if !socs.contains(&checked.target.soc) {
            socs.push(checked.target.soc);
        }
    }
    let width = socs.iter().map(|soc| soc.name().len()).max().unwrap_or(0);
    let mut head = format!("  {:width$}", "");
    for cann in &canns {
        let _ = write!(head, " {:<8}", cann.name());
    }
    output.line(head.trim_end())?;
    for soc in socs {
        let mut row = format!("  {:width$}", soc.name());
        for &cann in &canns {
            let on = |checked: &&Checked| (checked.target.soc, checked.target.cann) == (soc, cann);
            let verdict = match all.iter().find(on) {
                None => "-",
                Some(checked) if checked.accepted => "accept",
                Some(_) => "reject",
            };
            let _ = write!(row, " {verdict:<8}");
        }
        output.line(row.trim_end())?;
    }
    let mut printed: Vec<&str> = Vec::new();
    for message in all.iter().filter_map(|checked| checked.message.as_deref()) {
        if !printed.contains(&message) {
            printed.push(message);
            let refused = all.iter().filter(|c| c.message.as_deref() == Some(message));
            output.line(format_args!("  on {}:", targets(refused)))?;
            output.line(format_args!("    {message}"))?;
        }
    }
    Ok(())
}

/// The targets of verdicts, with the releases of each product after its name.
fn targets<'a>(all: impl Iterator<Item = &'a Checked>) -> String {
    let mut text = String::new();
    let mut product = None;
    for Checked { target, .. } in all {
        let separator = match product {
            Some(soc) if soc == target.soc => ", ",
            Some(_) => "; ",
            None => "",
        };
        text += separator;
        if product != Some(target.soc) {
            let _ = write!(text, "{} with ", target.soc.name());
        }
        product = Some(target.soc);
        text += target.cann.name();
    }
    text
}
