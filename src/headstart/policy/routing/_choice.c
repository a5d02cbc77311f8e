/* What a router asks of all its workers for each request: in Python it is some hundred small steps over arrays, each of which costs
   more than what it does. `headstart_runs` is `Holders.runs` of one table, `headstart_estimates` is `estimate` for each worker;
   what they mean stands there. No Python.h: one build serves every interpreter. */

#include <math.h>
#include <stdint.h>

#define SPREAD 0x9E3779B97F4A7C15u /* as in holders.py */

enum { MEMORY, DISK, POOL, PLANES };

/* Returns where a key is in a table of `size` rows, a power of two, or the free row where it would be. */
static int64_t row_of(uint64_t key, const uint64_t *table, int64_t size)
{
    int64_t row = (int64_t)(key * SPREAD >> (64 - __builtin_ctzll((uint64_t)size)));
    while (table[row] && table[row] != key)
        row = (row + 1) & (size - 1);
    return row;
}

/* Writes to `runs` [plane, worker] how many of the keys from the first on each worker has, as far as they are in the table
   `young`, and returns 0 where the next one is in `old`: then there is more to do. `masks` is [plane, row, word]; `kept` has room
   for [plane, word]. */
int headstart_runs(const uint64_t *keys, int64_t count, const uint64_t *young, const uint64_t *masks, int64_t size,
                   const uint64_t *old, int64_t old_size, int64_t words, int64_t workers, uint64_t *kept, int64_t *runs)
{
    for (int64_t i = 0; i < PLANES * words; i++)
        kept[i] = ~(uint64_t)0;
    for (int64_t i = 0; i < PLANES * workers; i++)
        runs[i] = 0;
    int64_t at = 0;
    int whole = 1;
    for (; at < count; at++) {
        uint64_t key = keys[at] ? keys[at] : 1;
        int64_t row = row_of(key, young, size);
        if (!young[row]) {
            whole = !old[row_of(key, old, old_size)];
            break;
        }
        for (int64_t word = 0; word < words; word++) {
            uint64_t has = 0;
            for (int plane = 0; plane < PLANES; plane++) {
                has |= masks[(plane * size + row) * words + word];
                uint64_t *still = kept + plane * words + word;
                uint64_t ended = *still & ~has;
                *still &= has;
                for (; ended; ended &= ended - 1) {
                    int64_t worker = 64 * word + __builtin_ctzll(ended);
                    if (worker < workers)
                        runs[plane * workers + worker] = at;
                }
            }
        }
    }
    for (int plane = 0; plane < PLANES; plane++)
        for (int64_t worker = 0; worker < workers; worker++)
            if (kept[plane * words + worker / 64] >> (worker % 64) & 1)
                runs[plane * workers + worker] = at;
    return whole;
}

/* A worker's row of costs, and of what goes on there, as many.py writes them. */
enum { ROW, KEY, PASS, SEQUENCE, ATTEND, DISK_TOKEN, DISK_START, POOL_TOKEN, POOL_START, CHUNK, COSTS };
enum { QUEUED, FIRST, SINCE, RUNNING, CONTEXT, ROOM, STATE };
enum { REUSED, READ_S, WAIT_S, COMPUTE_S, WORK_S, COST, FOUND };

#define STEPS_LEFT 200 /* as in estimate.py */

static double prefill_s(const double *cost, double start, double end)
{
    return end > start ? cost[ROW] * (end - start) + cost[KEY] * ((end * end - start * start) / 2) : 0;
}

/* Writes to `found` [what, count] what the prompt costs on each of the workers `numbers`. `costs` and `states` have a row for each
   worker there may be, `runs` is [plane, worker]. */
void headstart_estimates(const int64_t *numbers, int64_t count, const double *costs, const double *states, const int64_t *runs,
                         int64_t workers, int64_t block_tokens, double tokens, double answer, double rate, double now_s,
                         double *found)
{
    for (int64_t i = 0; i < count; i++) {
        int64_t worker = numbers[i];
        const double *cost = costs + worker * COSTS, *state = states + worker * STATE;
        double queued_s = state[QUEUED] - fmin(state[FIRST], fmax(0, now_s - state[SINCE]));
        double running = state[RUNNING], context = state[CONTEXT];
        double step_s = running > 0 ? cost[PASS] + cost[SEQUENCE] * running + cost[ATTEND] * context : 0;
        double answer_s = answer * (cost[SEQUENCE] + cost[ATTEND] * tokens);
        double missing = tokens + answer - state[ROOM], wait_s = queued_s;
        if (missing > 0 && running > 0)
            wait_s += step_s * STEPS_LEFT * fmin(1, missing / fmax(1, context / running) / running);
        double pressure = rate * (queued_s + prefill_s(cost, fmin((double)(runs[POOL * workers + worker] * block_tokens), tokens), tokens));
        double reused = 0, read_s = 0, best = INFINITY;
        for (int plane = 0; plane < PLANES; plane++) {
            double end = fmin((double)(runs[plane * workers + worker] * block_tokens), tokens - 1);
            if (plane == MEMORY)
                reused = end;
            else {
                double token_s = cost[plane == DISK ? DISK_TOKEN : POOL_TOKEN], start_s = cost[plane == DISK ? DISK_START : POOL_START];
                if (end <= reused || isinf(start_s))
                    continue;
                read_s += token_s * (end - reused) + start_s;
                reused = end;
            }
            double alone_s = prefill_s(cost, reused, tokens);
            double compute_s = alone_s + step_s * ceil((tokens - reused) / cost[CHUNK]), work_s = alone_s + answer_s;
            double sum = fmax(wait_s, read_s) + compute_s + pressure * work_s;
            if (plane == MEMORY || sum < best) {
                best = sum;
                const double row[FOUND] = {reused, read_s, wait_s, compute_s, work_s, sum};
                for (int what = 0; what < FOUND; what++)
                    found[what * count + i] = row[what];
            }
        }
    }
}
