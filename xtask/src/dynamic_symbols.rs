//! The dynamic symbols of libraries and programs: their names, and taking names out of a library, so that neither
//! loaders nor linkers find them in it.

/// Type of the section of symbols that a loader reads.
const DYNAMIC_SYMBOLS: u64 = 11;
/// Bytes of a symbol, and of a section's header.
const SYMBOL: usize = 24;
const SECTION: usize = 64;

/// Makes every defined symbol that `hides` names an undefined weak symbol, which the library would import if another
/// library had it, and does without otherwise. Returns their names.
///
/// # Errors
/// If the bytes are no 64-bit little-endian ELF file.
pub(crate) fn hide(elf: &mut [u8], hides: impl Fn(&str) -> bool) -> Result<Vec<String>, String> {
    let symbols = symbols(elf).ok_or("not a 64-bit little-endian ELF file")?;
    let mut hidden = Vec::new();
    for (at, name) in symbols {
        let Some(symbol) = elf.get_mut(at..at + SYMBOL) else {
            continue;
        };
        let defined = symbol[6..8] != [0, 0];
        if defined && hides(&name) {
            // Binding, section, value and size.
            symbol[4] = 2 << 4 | symbol[4] & 0xf;
            symbol[6..].fill(0);
            hidden.push(name);
        }
    }
    hidden.sort_unstable();
    Ok(hidden)
}

/// The names of the symbols that a file defines, or of those that it takes from others.
///
/// # Errors
/// If the bytes are no 64-bit little-endian ELF file.
pub(crate) fn names(elf: &[u8], defined: bool) -> Result<Vec<String>, String> {
    let symbols = symbols(elf).ok_or("not a 64-bit little-endian ELF file")?;
    let wanted = |at: usize| {
        let section = elf.get(at + 6..at + 8);
        section.is_some_and(|section| (section != [0, 0]) == defined)
    };
    let symbols = symbols.into_iter().filter(|(at, _)| wanted(*at));
    Ok(symbols.map(|(_, name)| name).collect())
}

/// Offsets and names of all dynamic symbols; `None` if the file is of another kind, or broken.
fn symbols(elf: &[u8]) -> Option<Vec<(usize, String)>> {
    if elf.get(..6)? != b"\x7fELF\x02\x01" {
        return None;
    }
    let sections = place(elf, 40, 8)?;
    let section = |index: usize| index.checked_mul(SECTION)?.checked_add(sections);
    let mut found = Vec::new();
    for index in 0..place(elf, 60, 2)? {
        let header = section(index)?;
        if number(elf, header.checked_add(4)?, 4)? != DYNAMIC_SYMBOLS {
            continue;
        }
        let (start, bytes) = (place(elf, header + 24, 8)?, place(elf, header + 32, 8)?);
        let texts = place(elf, section(place(elf, header + 40, 4)?)?.checked_add(24)?, 8)?;
        let end = start.checked_add(bytes)?;
        elf.get(start..end)?;
        for at in (start..end).step_by(SYMBOL) {
            let text = elf.get(texts.checked_add(place(elf, at, 4)?)?..)?;
            let length = text.iter().position(|&byte| byte == 0)?;
            found.push((at, String::from_utf8_lossy(&text[..length]).into_owned()));
        }
    }
    Some(found)
}

fn place(elf: &[u8], at: usize, size: usize) -> Option<usize> {
    usize::try_from(number(elf, at, size)?).ok()
}

fn number(elf: &[u8], at: usize, size: usize) -> Option<u64> {
    let bytes = elf.get(at..at.checked_add(size)?)?;
    Some(bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
}

#[cfg(test)]
mod tests {
    use super::hide;

    #[test]
    fn what_is_no_library_is_refused() {
        let mut broken = b"\x7fELF\x02\x01".to_vec();
        broken.resize(64, 0xff);
        for mut bytes in [Vec::new(), b"!<arch>\n".to_vec(), broken] {
            assert!(hide(&mut bytes, |_| true).is_err());
        }
    }
}
