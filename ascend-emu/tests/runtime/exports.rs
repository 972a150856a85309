//! The crate offers the C functions to Rust and none of their names to the linker.

use std::collections::HashSet;

macro_rules! names {
    ($( [$library:ident] fn $name:ident ( $( $argument:ident : $type:ty ),* ) -> $result:ty ; )*) => {
        &[ $( stringify!($name) ),* ]
    };
}

const NAMES: &[&str] = ascend_sys::for_each_function! { names };

#[test]
fn the_table_has_every_function_of_the_release() {
    let functions = ascend_emu::functions();
    let missing = NAMES.iter().copied();
    let missing: Vec<_> = missing.filter(|name| !functions.names().any(|there| there == *name)).collect();
    // 9.0 has the first, and 9.1 does not; the second is of 9.2.
    let other_releases = ["aclnnQuantFlashAttentionScore", "aclnnSparseFlashAttentionV2"];
    let pairs = other_releases.iter().flat_map(|name| [format!("{name}GetWorkspaceSize"), (*name).to_owned()]);
    assert_eq!(missing, pairs.collect::<Vec<_>>());
}

fn number(bytes: &[u8], at: usize, size: usize) -> usize {
    bytes[at..at + size].iter().rev().fold(0, |value, &byte| value << 8 | usize::from(byte))
}

/// Names in the symbol tables of a 64-bit little-endian ELF file.
fn symbols(elf: &[u8]) -> HashSet<String> {
    assert_eq!(&elf[..6], b"\x7fELF\x02\x01");
    let (sections, size, count) = (number(elf, 40, 8), number(elf, 58, 2), number(elf, 60, 2));
    let section = |i: usize| sections + i * size;
    let mut names = HashSet::new();
    for i in 0..count {
        let at = section(i);
        // SHT_SYMTAB and SHT_DYNSYM; their link is the section of the names.
        if !matches!(number(elf, at + 4, 4), 2 | 11) {
            continue;
        }
        let texts = number(elf, section(number(elf, at + 40, 4)) + 24, 8);
        let (offset, bytes) = (number(elf, at + 24, 8), number(elf, at + 32, 8));
        for symbol in (offset..offset + bytes).step_by(24) {
            let name = &elf[texts + number(elf, symbol, 4)..];
            let end = name.iter().position(|&byte| byte == 0).unwrap();
            names.insert(String::from_utf8_lossy(&name[..end]).into_owned());
        }
    }
    names
}

#[test]
fn no_c_name_is_a_symbol_of_a_program_that_uses_the_crate() {
    // The table is used, so the functions are in this program.
    assert!(ascend_emu::functions().aclInit.is_some());
    let program = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    let symbols = symbols(&program);
    assert!(symbols.contains("main"), "the file has its symbols");
    for name in NAMES {
        assert!(!symbols.contains(*name), "{name} is a symbol");
    }
}
