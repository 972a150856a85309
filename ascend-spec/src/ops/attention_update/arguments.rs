//! The arguments of AttentionUpdate, in its own order.

/// Passes the tokens `$with` and then the table of arguments to the macro `$then`; [`operator`](crate::operator)
/// describes the table's form.
///
/// Source: aclnnAttentionUpdate, parameter table.
#[doc(hidden)]
#[macro_export]
macro_rules! attention_update_arguments {
    ($then:ident $with:tt) => {
        $then! { $with
            1 { lse: list, Lse, "lse", "Log-sum-exps of the parts, `[rows]` each." }
            1 { local_out: list, LocalOut, "localOut",
                "Attention over the parts, `[rows, D]` each, rows in the order of `lse`." }
            1 { update_type: int = 0, UpdateType, "updateType",
                "0: merges the attention alone. 1: also the log-sum-exps." }
            1 { out: output_mut, Out, "out", "Merged attention, `[rows, D]`." }
            1 { lse_out: output_mut, LseOut, "lseOut", "Merged log-sum-exps, `[rows]`; with `update_type` 1 only." }
        }
    };
}

attention_update_arguments! { declare_arguments { "AttentionUpdate", #[derive(Copy)] UpdateCall<'a> } }
