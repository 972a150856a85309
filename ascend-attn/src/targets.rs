//! For which products and releases `ascend-attn check` judges a call.

use ascend_attention::spec::{Cann, Soc, Target};
use ascend_attention::{Error, Machine};

use super::{Stop, output};

/// The targets that the command line names.
pub(super) struct Targets {
    socs: Vec<Soc>,
    canns: Vec<Cann>,
    /// Whether a table of verdicts is printed.
    pub(super) all: bool,
}

/// The products that have one of the contract's operators.
const PRODUCTS: [Soc; 4] = [Soc::AtlasA2, Soc::AtlasA3, Soc::Ascend950, Soc::AtlasInference];

/// Writes a remark on the release whose contract stands in for one that has none of its own.
fn remark_of_stand_in(name: &str, cann: Cann) {
    let behind = name.trim().strip_prefix(cann.name());
    if behind.is_none_or(|rest| rest.starts_with(|c: char| c.is_ascii_digit())) {
        output::remark(&format!(
            "--cann {}: its contract is not known by itself; calls are judged by that of {cann}, the nearest before it",
            name.trim()
        ));
    }
}

impl Targets {
    /// The targets of `--soc` and `--cann`.
    pub(super) fn of(soc: Option<&str>, cann: Option<&str>) -> Result<Self, Stop> {
        let socs = match soc {
            None => Vec::new(),
            Some("all") => PRODUCTS.to_vec(),
            Some(name) => vec![Soc::from_name(name).ok_or_else(|| {
                Stop::Trouble(format!(
                    "--soc {}: no chip that is known; allowed: {}, and all",
                    name.escape_debug(),
                    Soc::NAME_FORMS
                ))
            })?],
        };
        let canns = match cann {
            None => Vec::new(),
            Some("all") => Cann::ALL.to_vec(),
            Some(name) => match name.parse() {
                Ok(cann) => {
                    remark_of_stand_in(name, cann);
                    vec![cann]
                }
                Err(error) => return Err(Stop::Trouble(format!("--cann {error}, or all"))),
            },
        };
        if let ([soc], [cann]) = (&socs[..], &canns[..]) {
            let chosen = Target::new(*soc, *cann).released();
            chosen.map_err(|error| Stop::Trouble(format!("--soc and --cann: {error}")))?;
        }
        Ok(Targets { socs, canns, all: [soc, cann].contains(&Some("all")) })
    }

    /// The targets of a call whose file or line names a product, or releases; `otherwise` is the release if none is
    /// named. Releases that do not know the product are left out if others do.
    pub(super) fn of_call(
        &self,
        soc: Option<Soc>,
        named: impl Iterator<Item = Cann>,
        otherwise: Cann,
    ) -> Result<Vec<Target>, Error> {
        let own = [soc.unwrap_or(Soc::AtlasA2)];
        let socs = match self.socs.is_empty() {
            true => &own[..],
            false => &self.socs,
        };
        let mut canns = self.canns.clone();
        if canns.is_empty() {
            canns.extend(named);
        }
        canns.sort_unstable();
        canns.dedup();
        let mut targets = Vec::new();
        for &soc in socs {
            match canns[..] {
                [] => targets.push(Target::with_default(soc, otherwise)),
                _ => targets.extend(canns.iter().map(|&cann| Target::new(soc, cann))),
            }
        }
        let first = targets.first().copied();
        targets.retain(|target| target.is_released());
        match (first, targets.is_empty()) {
            (Some(first), true) => Ok(vec![first.released()?]),
            _ => Ok(targets),
        }
    }

    /// The targets of a case file that names this chip and this release.
    pub(super) fn of_case(&self, soc_name: Option<&str>, cann: Option<Cann>) -> Result<Vec<Target>, Error> {
        let soc = match soc_name {
            None => None,
            Some(name) => Some(Soc::from_name(name).ok_or_else(|| Error::UnknownProduct { name: name.to_owned() })?),
        };
        self.of_call(soc, cann.into_iter(), Machine::DEFAULT_CANN)
    }
}
