-- Loads entries in the order of their members.
--
-- KEYS     entries, order
-- ARGV[1]  member after which it begins; empty for the beginning
-- ARGV[2]  limit of entries
-- ARGV[3]  bytes of notes after which there is no further one
-- ARGV[4]  name of the keys of due entries, without the queue
--
-- Returns the first key, the time, 1 if there may be further entries, else 0, and for each entry its
-- member, its time and its value.
local limit, bytes = tonumber(ARGV[2]), tonumber(ARGV[3])
local from = ARGV[1] == '' and '-' or '(' .. ARGV[1]
local entries, count, size, missing = {}, 0, 0, 0
local function page(more)
  return {KEYS[1], digits(now), more, entries}
end

-- Members without an entry do not count toward the limit: a page of them would look like the end.
while true do
  local members, failed =
    call('ZRANGEBYLEX', KEYS[2], from, '+', 'LIMIT', '0', digits(limit + 1))
  if failed then
    return failed
  end
  for _, member in ipairs(members) do
    if missing == MAX_MISSING or size >= bytes then
      return page('1')
    end
    local value, due
    value, failed = call('HGET', KEYS[1], member)
    if failed then
      return failed
    end
    if value then
      local queue = queue_of(value)
      -- The due time of a damaged entry is unknown; the client reports the damage.
      due = '0'
      if queue then
        due, failed = call('ZSCORE', ARGV[4] .. queue, member)
        if failed then
          return failed
        end
      end
    else
      drop(KEYS[2], member)
    end
    if due then
      if count == limit then
        return page('1')
      end
      count = count + 1
      size = size + #value
      entries[3 * count - 2] = member
      entries[3 * count - 1] = digits(tonumber(due))
      entries[3 * count] = value
    else
      missing = missing + 1
    end
    from = '(' .. member
  end
  if #members <= limit then
    return page('0')
  end
end
