"""Failures that people who run KV caches met in public, C001 and on, each told in our words as what must hold here, and the
tests that state it. Nothing is claimed in vain: every test named here exists. `ELSEWHERE` says what is not stated yet, and why.

    s06 · test_name                 tests/spec/test_s06_….py and so on; the folders are in FILES
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FILES = {
    "absences": "spec/test_absences.py",
    "s01": "spec/test_s01_truth.py",
    "s02": "spec/test_s02_longest_prefix.py",
    "s03": "spec/test_s03_lease.py",
    "s04": "spec/test_s04_budget.py",
    "s05": "spec/test_s05_recovery.py",
    "s06": "spec/test_s06_isolation.py",
    "s07": "spec/test_s07_once.py",
    "s08": "spec/test_s08_failure_is_a_miss.py",
    "s09": "spec/test_s09_layers.py",
    "s10": "spec/test_s10_same_answer.py",
    "keys": "block/test_keys.py",
    "format": "block/test_format.py",
    "representation": "block/test_representation.py",
    "loads": "cache/test_failing_loads.py",
    "hanging": "cache/test_hanging_tiers.py",
    "leases": "cache/test_leases.py",
    "opening": "cache/test_open_cache.py",
    "saves": "cache/test_saves.py",
    "states": "cache/test_states.py",
    "prefix": "engine/torch/test_prefix.py",
    "engine": "engine/torch/test_engine.py",
    "adapters": "engine/torch/test_lora.py",
    "handoff": "engine/torch/test_handoff.py",
    "handoff faults": "engine/torch/test_handoff_faults.py",
    "meeting": "engine/torch/test_meeting.py",
    "scheduling": "engine/torch/test_scheduling.py",
    "many": "engine/torch/test_many_requests.py",
    "llama": "engine/llama/test_llama_engine.py",
    "llama disk": "engine/llama/test_llama_slow_disk.py",
    "llama files": "engine/llama/test_llama_files.py",
    "llama ranges": "engine/llama/test_llama_context.py",
    "slow disk": "engine/torch/test_slow_disk.py",
    "transfer": "transfer/test_load.py",
    "vllm pages": "vllm/test_pages.py",
    "vllm faults": "vllm/test_faults.py",
    "vllm restart": "vllm/test_restart.py",
    "vllm ranks": "vllm/test_ranks_and_company.py",
    "events": "cache/test_events.py",
    "api": "api/test_openai_client.py",
    "roles": "api/test_roles.py",
    "canonical": "render/test_canonical.py",
    "noise": "api/test_canonical_requests.py",
    "reports": "diagnose/test_report.py",
    "accounts": "api/test_accounts.py",
    "tenants": "api/test_real_accounts.py",
    "clients": "api/test_many_clients.py",
    "serve": "cli/test_serve.py",
    "capabilities": "cases/test_capabilities.py",
    "boundaries": "engine/torch/test_boundaries.py",
    "names": "cases/test_shards_and_names.py",
    "directories": "cases/test_directories.py",
    "bounds": "tier/disk/test_disk_bounds.py",
    "damage": "tier/disk/test_disk_damage.py",
    "flips": "tier/disk/test_disk_bit_flips.py",
    "kills": "tier/disk/test_disk_kills.py",
    "crowd": "tier/disk/test_disk_crowd.py",
    "crash": "tier/disk/test_disk_crash.py",
    "joining": "tier/disk/test_disk_joining.py",
    "emptying": "tier/disk/test_disk_emptying.py",
    "verified": "tier/disk/test_disk_verified_loads.py",
    "retention": "tier/disk/test_disk_retention.py",
    "recovery": "tier/disk/test_disk_recovery.py",
    "reopen": "tier/disk/test_disk_reopen.py",
    "template": "diagnose/test_template_check.py",
    "divergence": "cases/test_prompt_divergence.py",
    "sharing": "tier/disk/test_disk_sharing.py",
    "strangers": "tier/disk/test_disk_strangers.py",
    "pressure": "tier/disk/test_disk_pressure.py",
    "only read": "tier/disk/test_disk_only_read.py",
    "wrong": "tier/disk/test_disk_wrong_use.py",
    "writing": "tier/disk/test_disk_writing.py",
    "door": "tier/disk/test_disk_door.py",
}

CASES = """
C001  Adapters are part of what a block is called, on every path.
      s06 · test_adapters_are_told_apart_by_content_and_order
      s06 · test_another_identity_never_hits
      adapters · test_requests_that_begin_alike_share_no_kv_across_adapters
C002  An adapter is its content, not its name.
      s06 · test_adapters_are_told_apart_by_content_and_order
      adapters · test_an_adapter_s_blocks_are_its_own_whatever_its_name
C003  No key depends on the order in which something was loaded into this process.
      keys · test_keys_are_the_same_in_every_process
      s06 · test_keys_are_the_same_in_every_process
C004  Parts of a key have tags: no two combinations of them collide.
      s06 · test_no_two_combinations_of_extra_parts_share_a_key
C005  Parts of a key have lengths: no secret continues another one's name.
      s06 · test_a_secret_crafted_to_continue_another_tenants_name_gives_another_key
      s06 · test_splitting_the_same_bytes_elsewhere_is_another_identity
C007  The whole digest of an image, and where it stands, reach every key that it touches.
      s06 · test_an_images_whole_digest_and_its_place_reach_every_key_that_it_touches
      s06 · test_a_cut_digest_is_refused
C008  Bytes of one dtype are never read as another, nor a file under another key.
      s01 · test_another_dtype_is_never_read_as_this_one
      damage · test_damaged_at_rest_it_is_a_miss_that_is_counted_once_and_saved_anew
      llama · test_other_kv_types_weights_builds_and_kernels_find_nothing
C009  Whatever changes the numbers changes the key; what only names does not.
      s06 · test_a_setting_that_changes_the_numbers_changes_the_architecture
      s06 · test_a_setting_that_only_names_changes_nothing
C010  Weights that change while serving make what was stored a miss, in every tier and after a restart.
      s06 · test_weights_updated_in_place_make_everything_stored_before_a_miss
C012  A shard of another split is never read as this one.
      names · test_a_shard_of_another_split_is_never_read_as_this_one_though_keys_agree
      representation · test_every_difference_in_layout_gives_another_digest
      vllm pages · test_ranks_that_split_heads_never_read_each_other_s_part
C013  A collision of hashes is a miss: token ids are compared.
      s01 · test_a_key_that_stands_over_other_tokens_is_a_miss
      loads · test_equal_keys_with_other_tokens_are_a_miss
      absences · test_keys_use_no_hash_of_python
C014  Another layout of the engine's memory is another representation.
      s01 · test_another_layout_is_never_read_as_this_one
      vllm pages · test_pages_come_back_bit_for_bit_into_other_blocks
C016  Sizes that disagree are a miss for that request, and for no other.
      s01 · test_a_view_with_buffers_of_the_wrong_size_is_refused_and_others_are_served
      loads · test_a_destination_of_the_wrong_size_fails_the_load_alone
      llama ranges · test_bytes_of_other_tokens_and_damaged_ones_are_refused
C017  A session that returns gets its own content, however much was evicted.
      s01 · test_returning_sessions_get_their_own_content
      verified · test_twenty_thousand_loaded_pieces_over_a_quarter_of_the_data_are_right_and_the_cap_holds
C018  What failed to be stored is not found.
      s08 · test_a_store_that_failed_is_not_visible
      pressure · test_a_failing_disk_is_never_an_exception_of_write_and_reading_goes_on
C019  A transfer that failed is a miss and is counted as one.
      s08 · test_a_tier_whose_every_read_fails_serves_nothing_and_says_so
C020  Every length comes back, those across each batch limit too.
      s01 · test_every_length_comes_back
C021  A load writes what matched and nothing beside it.
      names · test_a_load_writes_nothing_beyond_what_matched
      s02 · test_a_hit_is_floored_to_whole_pieces
      vllm pages · test_pages_that_vllm_has_already_are_not_touched
C022  At least one token is left to compute; only full blocks are stored.
      s02 · test_at_least_one_token_is_left_to_compute
      keys · test_only_full_blocks_have_keys
C023  What is being saved stays valid until its ticket is done, and is not read afterwards.
      saves · test_nothing_is_read_from_a_source_once_its_ticket_is_done
      prefix · test_kv_is_kept_until_it_is_saved
      scheduling · test_an_abort_while_a_save_holds_the_memory_that_another_waits_for_ends_both_well
      many · test_thousands_of_random_acts_leave_every_answer_what_it_is_alone_and_all_memory_free
      vllm pages · test_what_is_copied_is_what_stood_there_when_the_step_ended
C024  A load that was given up writes nothing afterwards; its memory is freed once, with its last read.
      s09 · test_a_cancelled_load_ends_and_touches_nothing_afterwards
      prefix · test_aborting_during_a_load_frees_the_memory_with_the_last_read
      scheduling · test_a_deadline_ends_a_request_in_every_state
      vllm pages · test_a_request_that_is_over_gives_its_blocks_back_at_once_and_once
      vllm faults · test_requests_aborted_amid_their_load_leave_nothing_behind
C026  A read slower than every eviction is still right.
      s03 · test_a_read_slower_than_every_eviction_is_still_right
      sharing · test_what_another_process_reads_is_not_removed
      joining · test_what_another_process_reads_stays_until_it_is_done_and_goes_then
C027  Nobody sees half of what is being written.
      directories · test_nobody_finds_what_is_still_being_written
      s01 · test_a_second_reader_never_sees_half_of_what_a_writer_is_writing
C029  A restore that failed spoils nothing else.
      s01 · test_a_changed_byte_anywhere_is_a_miss_from_there_and_spoils_nothing_else
      llama · test_a_range_that_the_context_does_not_take_is_computed_while_the_rest_is_read
C030  What is usable is the minimum over all layers.
      transfer · test_usable_is_the_minimum_over_layers_and_is_split_by_tier
C032  Of a prompt that its worker gave up in the middle nothing half there is used: it is computed, and nothing stays held.
      handoff faults · test_a_prompt_that_the_other_cannot_compute_is_computed_here
      handoff faults · test_a_wire_that_is_cut_anywhere
      handoff faults · test_what_arrived_before_the_end_is_used
C033  What failed to load is computed, and the answer is the same.
      s09 · test_the_tokens_before_a_bad_block_stay_usable
      s10 · test_the_tiny_model_gives_the_same_tokens_in_every_way
      prefix · test_a_load_that_fails_keeps_the_good_part_and_computes_the_rest
      vllm faults · test_200_requests_at_once_with_one_read_in_ten_failing_answer_as_plain_vllm_does
      llama · test_wrong_bytes_on_disk_are_computed_instead
      llama disk · test_what_a_failing_disk_does_not_bring_is_computed
C035  No layer is attended before it was verified; a failure wakes everybody.
      s09 · test_a_layer_waited_for_is_right_and_so_are_all_before_it
      s09 · test_a_failure_wakes_everybody_who_waits
C036  A tenant is apart in every tier, and finds its own again.
      s06 · test_another_salt_never_hits_beyond_what_is_shared
      s06 · test_tenants_share_exactly_the_blocks_that_were_declared_shared
      vllm restart · test_a_tenant_s_prompt_is_found_with_its_salt_and_only_with_it
C037  A salt given over HTTP, and a key's tenant, reach the names of blocks in every tier.
      api · test_five_salts_never_share_and_each_finds_its_own
      tenants · test_five_tenants_one_prompt_through_memory_disk_and_a_restart
C038  The salt of a tenant is none that a request can give; where there are keys, nobody is let in without one.
      accounts · test_five_tenants_share_no_prefix_whatever_salt_they_give_and_each_finds_its_own
      accounts · test_without_a_key_nothing_is_told_but_that_the_server_lives
C040  Keys are the same in every process, version of Python and environment.
      s06 · test_keys_are_the_same_in_every_process
      format · test_names_are_those_of_the_golden_file
C041  No key uses Python's hash.
      absences · test_keys_use_no_hash_of_python
C042  Ranks agree on keys.
      names · test_a_shard_of_another_split_is_never_read_as_this_one_though_keys_agree
      vllm ranks · test_two_ranks_find_their_parts_after_a_restart
C044  After a close or a kill everything is found, and nothing is written again.
      s05 · test_a_clean_restart_finds_everything_and_writes_nothing_again
      s05 · test_a_killed_process_loses_nothing_that_a_ticket_confirmed
      llama · test_what_is_saved_when_the_engine_closes_is_there_afterwards
C045  What is there at a start counts, whoever wrote it; what another version wrote is charged and stays.
      s04 · test_a_restart_counts_what_is_there
      s04 · test_another_representation_in_the_same_directory_is_counted_and_gives_way
      recovery · test_a_segment_of_another_version_is_kept_and_charged
      bounds · test_what_a_dead_writer_left_is_counted_by_those_that_live_at_once
C047  Heads outlive their tails: nothing is stored that no prompt can reach.
      directories · test_whatever_is_left_of_a_chain_can_be_reached_from_its_head
      retention · test_no_tail_outlives_its_head_whatever_was_used
      s02 · test_a_missing_head_makes_the_rest_a_miss_until_it_is_saved_again
C048  A directory that is removed while serving stops nothing and is made anew.
      s08 · test_a_directory_removed_while_serving_stops_nothing
      sharing · test_a_directory_removed_while_in_use_loses_entries_and_is_made_anew
C049  Crashes do not add up, and a tier that cannot be opened stops no start.
      directories · test_seventy_crashes_leave_a_directory_that_opens_within_its_cap
      s05 · test_crashes_one_after_another_do_not_add_up
      opening · test_a_directory_that_cannot_be_used_is_a_warning
C051  A short side task does not take the place of a long session.
      directories · test_a_short_side_task_does_not_take_the_place_of_the_long_session
C052  Killed at any point, each block is right or absent, and nobody has to clean up.
      s05 · test_dying_in_any_call_of_a_save_leaves_what_was_there_and_no_litter
      kills · test_writers_killed_at_random_points_lose_nothing_that_was_acknowledged_and_leave_no_litter
C053  Bytes are synced before what speaks of them; without power nothing that was acknowledged is lost.
      directories · test_bytes_reach_the_medium_before_their_record_and_a_whole_file_before_its_name
      crowd · test_without_power_nothing_is_lost_that_durability_data_acknowledged
      crash · test_without_power_synced_extents_stay_and_the_rest_is_right_or_absent
      s05 · test_a_power_cut_loses_but_never_lies
C054  Files that are cut, longer or changed give misses, counted, with and without direct I/O.
      damage · test_damaged_at_rest_it_is_a_miss_that_is_counted_once_and_saved_anew
      damage · test_damaged_while_it_is_open_it_is_a_miss_that_is_counted_once_and_saved_anew
      flips · test_a_bit_changed_at_rest_in_any_extent_is_never_served_and_costs_one_load
      s08 · test_a_disk_without_direct_reads_and_without_holes_serves_all_the_same
      vllm restart · test_files_that_were_cut_off_are_a_miss_and_the_answer_is_the_same
C055  A full disk stops storing, hangs nobody, serves hits and resumes by itself.
      s08 · test_a_full_disk_stops_storing_serves_hits_and_resumes_by_itself
      pressure · test_on_a_real_full_file_system_the_oldest_give_way
      bounds · test_storing_resumes_when_the_disk_does_though_nothing_is_saved
      vllm faults · test_a_full_disk_costs_only_saves
C056  Files that are gone or replaced between match and load are a miss; what was published since stays.
      s08 · test_files_that_vanish_between_match_and_load_are_a_miss
      strangers · test_a_segment_that_is_replaced_while_it_is_known_is_lost
      damage · test_damaged_while_it_is_open_it_is_a_miss_that_is_counted_once_and_saved_anew
      sharing · test_an_extent_that_another_process_removed_is_not_called_corrupt
      llama disk · test_a_device_that_fails_below_the_tier_costs_its_blocks_alone
C058  A bad block is tried once, and found again once it was saved again.
      s08 · test_a_bad_block_is_tried_once_then_forgotten_until_it_is_saved_again
      flips · test_a_bit_changed_under_a_running_tier_costs_one_load_and_is_saved_anew
C059  A tier that hangs delays no request by more than its patience.
      s08 · test_a_writer_that_hangs_delays_no_match_and_no_load
      hanging · test_what_faster_tiers_have_counts_when_a_lookup_hangs
      vllm pages · test_a_read_that_hangs_ends_at_the_deadline_and_never_touches_a_page_again
      llama disk · test_a_disk_that_hangs_elsewhere_holds_up_nobody
      llama disk · test_a_disk_that_hangs_amid_a_read_holds_up_nobody
C060  A load that failed is reported with what it lacks, and the engine computes it.
      vllm pages · test_a_read_that_fails_is_reported_with_the_blocks_that_lack_something
C061  A load that fails ends by itself, with no other request there.
      s08 · test_a_read_that_hangs_ends_at_the_deadline
      prefix · test_a_load_past_its_deadline_is_computed_in_fresh_memory
C063  Who leaves frees at once what is computed for it elsewhere, however many leave.
      handoff faults · test_many_that_leave_free_all_that_was_computed_for_them
      handoff faults · test_who_goes_away_frees_what_is_computed_for_it
C066  A disk without direct I/O, holes or allocation ahead serves all the same, and says so.
      reopen · test_a_directory_without_direct_io_works_and_says_so
      directories · test_without_fallocate_everything_is_stored_served_and_bounded
C067  Lookups leave nothing pinned.
      s03 · test_lookups_leave_nothing_pinned
      leases · test_what_lies_behind_an_extent_that_went_before_its_lease_is_not_kept
C069  Looking extends no life.
      s03 · test_looking_does_not_keep_a_prompt_alive
C070  What waits to be written is bounded; what is dropped is said.
      s04 · test_saves_that_the_disk_cannot_follow_are_dropped_at_the_bound
      saves · test_a_full_queue_drops_the_save_and_says_so_at_once
C072  A cap holds at every moment, for one big entry too, and counts everything.
      s04 · test_no_save_takes_a_tier_above_its_capacity
      s04 · test_a_prompt_larger_than_the_memory_tier_goes_to_disk_and_spares_what_is_in_memory
      bounds · test_whoever_dies_while_it_adds_at_the_cap_takes_no_byte_more_than_it
      verified · test_twenty_thousand_loaded_pieces_over_a_quarter_of_the_data_are_right_and_the_cap_holds
C076  A disk that is slower than computing is not read any more, and tried again after a while.
      slow disk · test_a_disk_that_is_slower_than_computing_is_left_alone_and_tried_again_after_a_minute
      meeting · test_a_load_that_does_not_come_is_overtaken
      llama disk · test_a_disk_that_is_slower_than_computing_is_turned_round_left_alone_and_tried_again
C077  Matching reads no payload.
      s02 · test_matching_reads_no_payload
C079  No folder grows large.
      directories · test_no_folder_grows_large_whatever_the_cache_holds
C080  Many blocks lie in few files, and giving space back never makes a living one unreadable.
      directories · test_many_blocks_lie_in_few_files
      emptying · test_what_is_used_again_and_again_outlives_the_files_that_it_lies_in
C082  Writers never share a temporary name, and leave none behind.
      directories · test_sixteen_writers_of_the_same_prompts_store_each_once_and_never_replace_it
      recovery · test_a_temporary_file_that_another_opener_removes_is_made_again
C083  What is published is not replaced by who comes later.
      directories · test_sixteen_writers_of_the_same_prompts_store_each_once_and_never_replace_it
      s07 · test_threads_that_save_the_same_prompts_store_each_once
C085  A checksum that changes in a billing header is named by diff, and dropped before it costs a hit.
      reports · test_a_checksum_in_a_billing_header_is_found_with_both_ids_and_what_it_costs
      canonical · test_the_billing_header_at_the_top_is_dropped_and_nothing_else
      noise · test_rules_that_need_no_memory
C086  A template that opens an answer with an empty think block, which history lacks, is found before it is served.
      template · test_an_empty_think_block_that_history_lacks_is_found
C087  An answer that comes back without the reasoning that led to it hits all the same, as far as the template writes it.
      noise · test_what_was_generated_comes_back_as_clients_write_it
C089  JSON that is written otherwise in each turn is named as that: order, spacing, escapes, numbers.
      divergence · test_a_tool_result_that_is_written_otherwise_is_named_as_that
C090  Tools are rendered as they were sent, never sorted, and a schema in another order is found at its tool.
      divergence · test_tools_are_rendered_as_they_were_sent_and_a_swapped_schema_is_found_at_its_tool
C092  Text that the model spelled in its own tokens is told by diff, and found again through what was generated.
      reports · test_the_same_text_in_other_tokens_is_a_finding_of_its_own
      noise · test_generated_tokens
C093  A clock in the system prompt is named, with its place and where to move it.
      divergence · test_a_clock_is_named_with_where_to_move_it
C095  A template that moves the tools as the conversation grows is found.
      template · test_tools_that_move_to_the_last_message_are_found
C096  Edits in the middle of a long session are counted, each with what it loses, and all tokens add up.
      divergence · test_every_edit_in_the_middle_of_a_long_session_is_counted_and_all_tokens_add_up
C100  Usage is the same streamed and whole, what is written is a part of the prompt, and nothing is counted twice.
      accounts · test_usage_is_the_same_streamed_and_whole
      accounts · test_the_log_has_a_line_for_each_request_and_sums_to_the_engines_counters
      clients · test_many_clients_that_leave_when_they_like_leave_nothing_behind
C102  A prefix that two workers have counts once.
      handoff · test_a_token_is_counted_once
      handoff · test_what_the_decoding_worker_has_is_not_sent
C103  What came from the worker that computed it is no hit; what either had is.
      handoff · test_a_token_is_counted_once
      roles · test_a_header_says_where_a_prompt_is_computed
C106  What a request that gave way gets back is no hit: cached tokens are never more than those of the prompt.
      scheduling · test_the_younger_gives_its_memory_and_goes_on_from_the_cache
      many · test_thousands_of_random_acts_leave_every_answer_what_it_is_alone_and_all_memory_free
      accounts · test_numbers_that_do_not_add_up_are_cut_and_counted_and_fail_no_request
      accounts · test_a_fault_in_keeping_accounts_reaches_no_request
C110  A process that starts again says so before it tells what it has: everything that was told before is to be forgotten.
      events · test_after_a_restart_everything_is_cleared_and_what_is_on_disk_is_told
C111  Who follows what is stored and begins anew, or missed something, is told all that is there, parents first.
      events · test_after_a_restart_everything_is_cleared_and_what_is_on_disk_is_told
      events · test_who_missed_something_is_sent_it_again
      events · test_who_missed_more_than_is_kept_is_told_what_is_there
C114  What can only go on from a state is a hit up to the latest one that was kept, and what lies behind it is told of.
      states · test_a_prompt_that_parts_between_two_states_goes_on_from_the_earlier_one
      s02 · test_where_states_are_needed_the_longest_prefix_ends_at_the_latest_one
      boundaries · test_where_prompts_were_seen_to_part_the_next_one_goes_on
      llama · test_a_recurrent_model_goes_on_from_saved_points
C116  What a model can do is known at the start: it is cached, runs without and says why, or is refused; nothing fails later.
      capabilities · test_what_can_be_cached_is
      capabilities · test_what_cannot_be_cached_runs_without_and_says_why
      capabilities · test_what_attends_across_two_texts_is_refused_in_a_sentence
      llama · test_a_model_whose_states_do_not_come_back_is_served_without_a_cache
      llama files · test_an_unknown_architecture_is_named
C117  A prompt that is wholly stored leaves one token to compute.
      s02 · test_at_least_one_token_is_left_to_compute
C119  Reading extends no promise and no ceiling.
      retention · test_a_use_promises_nothing
      retention · test_what_is_older_than_its_ceiling_goes_though_there_is_room
C120  A clock that jumps ends no life early and makes none eternal; leases know no clock.
      retention · test_what_a_clock_ahead_has_written_lives_at_most_its_time_from_now
      retention · test_a_clock_set_back_while_closed_ends_no_life_early
      retention · test_a_wall_clock_that_is_set_while_running_changes_no_promise
C122  Of two classes the longer one wins in either order, and a head is kept with its tail.
      retention · test_of_two_classes_the_longer_one_holds_whichever_came_first
      retention · test_a_head_that_is_kept_with_its_tail_is_promised_as_much
      retention · test_a_head_grows_as_old_as_what_continues_it
C123  Nothing is executed from what is read.
      absences · test_nothing_runs_what_it_reads
      handoff faults · test_whatever_else_connects_is_shown_out
C125  It listens on loopback unless told otherwise or keys are asked for, and what tells of all is an operator's.
      serve · test_an_address_that_others_reach_needs_leave
      accounts · test_without_a_key_nothing_is_told_but_that_the_server_lives
      accounts · test_metrics_tell_of_all_tenants_to_an_operator_alone
C126  Nothing over HTTP clears, exports or imports what is stored, and no error names a folder.
      accounts · test_nothing_over_http_clears_exports_or_imports_what_is_stored
C128  Names of files are short, hexadecimal and say nothing; a salt stands nowhere.
      names · test_names_of_files_are_short_and_say_nothing
      s06 · test_a_salt_stands_nowhere_on_the_medium
C129  Events are told on loopback unless allowed elsewhere, and a subscriber that never reads holds up nobody.
      events · test_others_may_not_read_prompts_by_accident
      events · test_a_subscriber_that_never_reads_holds_up_nobody
C137  Without allocation ahead and holes everything works, by what is charged.
      directories · test_without_fallocate_everything_is_stored_served_and_bounded
      writing · test_holes_that_cannot_be_made_do_not_empty_the_tier
C138  A directory is private to its user whatever the umask; to another one a miss and a sentence, or readable.
      directories · test_another_users_directory_is_a_miss_and_a_sentence
      reopen · test_directories_and_files_are_private
      wrong · test_a_directory_that_cannot_be_written
      only read · test_a_read_only_mount_serves_hits_and_skips_stores_with_one_warning
      only read · test_another_users_files_that_may_be_read_are_hits_and_nothing_of_them_changes
"""

ELSEWHERE = {
    "ranks that must act together": ("C064",),
    "a router": ("C043", "C108", "C109", "C113"),
    "a cache server of its own": ("C074",),
    "every option has an effect": ("C073",),
    "usage and prices": ("C098", "C099", "C105"),
    "answers by meaning": ("C130", "C132", "C133", "C134", "C135"),
}


def stated() -> list[tuple[str, str, str]]:
    """Return (case, file, test) of each line of CASES that names a test."""
    found, case = [], ""
    for line in CASES.strip().splitlines():
        if line.startswith("C"):
            case = line[:4]
        else:
            name, test = line.strip().split(" · ")
            found.append((case, FILES[name], test))
    return found


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("file", sorted({file for _, file, _ in stated()}))
def test_every_test_that_states_a_case_exists(file: str) -> None:
    named = {test for _, where, test in stated() if where == file}
    assert named - functions_of(TESTS / file) == set()


def test_every_case_is_stated_or_said_to_be_elsewhere() -> None:
    headed = [line[:4] for line in CASES.strip().splitlines() if line.startswith("C")]
    assert headed == sorted(set(headed)), "in order, each once"
    assert set(headed) == {case for case, _, _ in stated()}
    elsewhere = [case for cases in ELSEWHERE.values() for case in cases]
    assert len(elsewhere) == len(set(elsewhere))
    assert set(headed).isdisjoint(elsewhere)
